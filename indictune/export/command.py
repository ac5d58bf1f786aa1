"""`indictune export`: write a finished model for another runtime, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import ExportArguments, MergeArguments
from indictune.config.recipe import read_arguments
from indictune.console_text import printable
from indictune.errors import Problems, UserError
from indictune.export.to_gguf import check_converter, write_gguf
from indictune.export.to_onnx import check_onnx_packages, write_onnx
from indictune.hub.card import write_card
from indictune.models.adapters import continues_texts
from indictune.models.atomic_folder import check_output_folder, whole_folder
from indictune.models.load import stored_quantisation
from indictune.models.merge import merge
from indictune.models.trained import trained_config
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction.served_classifier import check_finished

FLAG = "--output_dir"
FORMATS = {"onnx": (check_onnx_packages, write_onnx), "gguf": (check_converter, write_gguf)}


def export_command(argv: Sequence[str]) -> int:
    """`indictune export DIR [--format onnx|gguf] [--output_dir D] [--int8 true]`; returns the exit code.

    Raises:
        UserError: with every problem of the flags, the model and the environment; or as `export`.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    print(printable(export(read_arguments(argv, ExportArguments, "--model"))))
    return 0


def export(args: ExportArguments) -> str:
    """Write the model to `args.output_dir`. Returns a line for the user.

    Raises:
        UserError: the model, the format and the environment do not fit together, or as the format's writer.
    """
    check_installed, write = FORMATS[args.format]
    name = f"{args.format}-int8" if args.int8 else args.format
    output_dir = Path(args.output_dir or Path(args.model) / name)
    problems = Problems()
    problems.attempt(check_installed)
    problems.attempt(_check_model, args)
    problems.attempt(check_output_folder, output_dir, FLAG)
    problems.raise_any()
    size_bytes = 2 * sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    with whole_folder(output_dir, FLAG, size_bytes) as folder, _plain_model(args, folder.parent) as model:
        folder.mkdir()
        remark = write(args, model, folder)
    write_card(output_dir, run=Path(args.model))
    return f"{output_dir}: {remark}"


def _check_model(args: ExportArguments) -> None:
    """Refuse a model that is not finished, or that the format cannot hold.

    Raises:
        UserError: `run-not-finished`, `no-model`, `export-wants-format` or `export-of-quantised`.
    """
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
def _plain_model(args: ExportArguments, work: Path) -> Iterator[Path]:
    """The folder of the model, or for an adapter the folder of the model that it and its base make together."""
    if not (Path(args.model) / ADAPTER_CONFIG).is_file():
        yield Path(args.model)
        return
    with TemporaryDirectory(dir=work) as temporary:
        merged = Path(temporary) / "merged"
        merge(MergeArguments(args.model, str(merged), trust_remote_code=args.trust_remote_code))
        yield merged
