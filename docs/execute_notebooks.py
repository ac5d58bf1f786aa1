"""Execute the notebooks, and keep their outputs: `make notebooks`, some minutes."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).with_name("notebooks")


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, after running it in a folder."""
    book: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return book


def tidied(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same with one output for each stream of a cell, the last state of its progress bars, and no own paths."""
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
        outputs: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            last = outputs[-1] if outputs else None
            same = last is not None and output["output_type"] == "stream" == last["output_type"]
            if same and last is not None and last["name"] == output["name"]:
                last["text"] += output["text"]
            else:
                outputs.append(output)
        for output in outputs:
            if output["output_type"] == "stream":
                lines = (line.rsplit("\r", 1)[-1].rstrip() for line in output["text"].split("\n"))
                output["text"] = "\n".join(lines).replace(str(FOLDER.parents[1]), "/home/me")
        kept = [output for output in outputs if output.get("text", "-").strip()]
        if cell.cell_type == "code":
            cell.outputs = kept
    return book


def main() -> None:
    """Write each notebook with its outputs."""
    os.environ |= {"INDICTUNE_CACHE": "cache", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    for path in sorted(FOLDER.glob("*.ipynb")):
        with TemporaryDirectory() as folder:
            nbformat.write(tidied(execute(path, Path(folder))), path)  # type: ignore[no-untyped-call]
        print(path)


if __name__ == "__main__":
    main()
