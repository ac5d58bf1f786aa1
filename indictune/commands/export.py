"""`indictune export`: write a finished model for another runtime, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from transformers.utils.logging import disable_progress_bar

from indictune.commands.merge import MergeFlags, merge
from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import ExportedModelArguments, flag
from indictune.console_text import printable
from indictune.errors import Problem, Problems, UserError, problem
from indictune.export.formats import check_converter, check_onnx_packages, write_gguf, write_onnx
from indictune.hub.card import write_card
from indictune.models.adapters import continues_texts
from indictune.models.atomic_folder import check_output_folder, whole_folder
from indictune.models.finished_model import trained_config
from indictune.models.load import stored_quantisation
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction.served_classifier import check_finished

_FLAG = "--output_dir"
_FORMATS = {"onnx": (check_onnx_packages, write_onnx), "gguf": (check_converter, write_gguf)}


@dataclass
class ExportFlags(ExportedModelArguments):
    """Which finished model is written for which other runtime."""

    needed = ("model", "indictune export FOLDER")

    format: Literal["onnx", "gguf"] = flag(
        "onnx", "`onnx`: a classifier for ONNX Runtime. `gguf`: a language model for llama.cpp."
    )
    output_dir: str = flag("", "Gets the exported model. Must not exist, or be empty. Default: MODEL/<format>.")

    def check(self) -> Iterator[Problem]:
        """Refuse texts to compare on where nothing is compared."""
        yield from super().check()
        if self.format == "gguf" and self.input_file is not None:
            yield problem("no-effect", "--input_file", self.input_file, other="--format gguf")


def run_export(flags: Mapping[str, list[str]]) -> int:
    """Write a model for another runtime."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    print(printable(export_model(read_arguments(flags, ExportFlags, "model"))))
    return 0


def export_model(args: ExportFlags) -> str:
    """Write the model to `args.output_dir`. Returns a line for the user."""
    check_installed, write = _FORMATS[args.format]
    name = f"{args.format}-int8" if args.int8 else args.format
    output_dir = Path(args.output_dir or Path(args.model) / name)
    problems = Problems()
    problems.attempt(check_installed)
    problems.attempt(_check_model, args)
    problems.attempt(check_output_folder, output_dir, _FLAG)
    problems.raise_any()
    size_bytes = 2 * sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    with whole_folder(output_dir, _FLAG, size_bytes) as folder, _plain_model(args, folder.parent) as model:
        folder.mkdir()
        remark = write(args, model, folder)
    write_card(output_dir, run=Path(args.model))
    return f"{output_dir}: {remark}"


def _check_model(args: ExportFlags) -> None:
    """Refuse a model that is not finished, or that the format cannot hold."""
    folder = Path(args.model)
    check_finished(folder)
    config = trained_config(ModelArguments(args.model, trust_remote_code=args.trust_remote_code))
    names = config.architectures or []
    if continues_texts(names) != (args.format == "gguf"):
        kind, fitting = ("no", "onnx") if args.format == "gguf" else ("a", "gguf")
        raise UserError("export-wants-format", "--format", args.format, model=folder, kind=kind, format=fitting)
    if stored_quantisation(config) and not (folder / ADAPTER_CONFIG).is_file():
        raise UserError("export-of-quantised", "--model", folder)


@contextmanager
def _plain_model(args: ExportFlags, work: Path) -> Iterator[Path]:
    """The folder of the model, or for an adapter the folder of the model that it and its base make together."""
    if not (Path(args.model) / ADAPTER_CONFIG).is_file():
        yield Path(args.model)
        return
    with TemporaryDirectory(dir=work) as temporary:
        merged = Path(temporary) / "merged"
        merge(MergeFlags(args.model, str(merged), trust_remote_code=args.trust_remote_code))
        yield merged
