"""How rows are read from a file, and what happens to those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from indictune.config.fields import Checked, flag
from indictune.errors import Problem, problem

LongText = Literal["truncate", "head_tail", "window"]
MAX_BAD_FRACTION = 0.01


@dataclass
class FileFormArguments(Checked):
    """How csv and tsv files are laid out."""

    delimiter: Literal["auto", ",", ";", "tab", "|"] = flag(
        "auto", "Character between the columns of a csv or tsv file. `auto`: the extension's, unless another one fits."
    )
    column_names: list[str] = flag(
        [], "Names of all columns of a csv, tsv, xlsx or ods file that has no header, in order, such as text,label."
    )
    quoting: Literal["standard", "none"] = flag(
        "standard", "`none`: quotes in a csv or tsv file are letters like others, and do not enclose a field."
    )


@dataclass
class TextArguments(FileFormArguments):
    """How the rows of a file are read."""

    text_column: str = flag("text", "Column with the text.")
    label_column: str = flag("label", "Column with the label.")
    language_column: str | None = flag(
        None, "Column with the language of each row. Default: `language` if it exists, else the language of the text."
    )
    max_length: int = flag(128, "Cut texts to this many tokens, special ones included.")
    long_text: LongText = flag(
        "truncate",
        "How a longer text is read. truncate: its first tokens. head_tail: its first and its last ones. window: all, "
        "in windows of --max_length tokens that overlap by a quarter; the mean of their logits is the text's.",
    )


@dataclass
class BadRowArguments(Checked):
    """What happens to rows that cannot be used."""

    bad_rows: Literal["stop", "quarantine"] = flag(
        "stop",
        "`stop` ends the run at rows that cannot be used. `quarantine` leaves them out and writes them, with the "
        "reason, to rejected.jsonl in --output_dir; `predict` to OUTPUT.rejected.jsonl, for --output_file OUTPUT.",
    )
    max_bad_fraction: float = flag(
        MAX_BAD_FRACTION, "With --bad_rows quarantine, stop if more than this share of a file's rows is bad."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse a limit of quarantined rows without quarantine."""
        yield from super().check()
        if self.bad_rows == "stop" and self.max_bad_fraction != MAX_BAD_FRACTION:
            way_out = "Use --bad_rows quarantine."
            yield problem("no-effect", "--max_bad_fraction", self.max_bad_fraction, way_out, other="--bad_rows stop")
