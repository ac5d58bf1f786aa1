"""`indictune merge`: make an adapter and its base one model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.errors import Problem, problem


@dataclass
class MergeFlags(Checked):
    """Which adapter becomes a complete model, and how it is written."""

    needed = ("adapter", "indictune merge ADAPTER --output_dir FOLDER")

    adapter: str = flag("", "Folder of the adapter. May be given as a bare first word.")
    output_dir: str = flag("", "Gets the merged model. Must not exist, or be empty.")
    base_model: str | None = flag(
        None, "The base model, as a folder or a Hub name. Default: the one the adapter was trained on."
    )
    base_revision: str | None = flag(
        None, "Branch, tag or commit of the base model. Default: the one the adapter was trained on."
    )
    base_weights: Literal["dequantised", "original"] | None = flag(
        None,
        "What an adapter of `--method qlora` is added to: `dequantised` (default) rounds the base model to 4 bit and "
        "back, as in training; `original` takes the weights of its checkpoint.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "Type of the merged weights. Default: that of the base model's checkpoint."
    )
    max_shard_size: str = flag("5GB", "Largest size of one file, such as 500MB or 5GB.")
    to_4bit: bool = flag(False, "Write the merged model in 4 bit, which rounds it again.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")

    def check(self) -> Iterator[Problem]:
        """Refuse no output folder, and a malformed size."""
        yield from super().check()
        if not self.output_dir:
            yield problem("output-dir-missing", "--output_dir")
        if re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size) is None:
            yield problem("shard-size", "--max_shard_size", self.max_shard_size)


def run_merge(flags: Mapping[str, list[str]]) -> int:
    """Write the merged model, with a card that has the scores of the adapter; returns the exit code.

    Raises:
        UserError: every problem of the flags, or as `merge`.
    """
    args = read_arguments(flags, MergeFlags, "adapter")
    from indictune.hub.card import write_card  # slow, as torch is
    from indictune.models.finished_model import merge

    print(printable(merge(**vars(args))))
    write_card(Path(args.output_dir), run=Path(args.adapter))
    return 0
