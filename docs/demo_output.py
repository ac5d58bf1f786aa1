"""What `make demo` prints when it has trained, in README.md.

    python -m docs.demo_output    # runs the demo, and writes README.md: minutes

The scores differ a little between kinds of CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
RECIPE = "recipes/sentiment/demo_pretrained.yaml"
BLOCK = re.compile(
    r"(?<=indictune train recipes/sentiment/demo_pretrained\.yaml\n```\n\n```text\n).*?(?=```\n)", re.DOTALL
)


def printed() -> str:
    """Of a demo that is run now: the table of its test rows, and the comparison with its baseline."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "indictune", "train", RECIPE, "--output_dir", folder]
        done = subprocess.run(command, cwd=README.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    parts = done.stdout.decode().split("\n\n")
    return "\n\n".join(part for part in parts if part.startswith(("test rows\n", "baseline, "))) + "\n"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(lambda _: printed(), text), encoding="utf-8")
