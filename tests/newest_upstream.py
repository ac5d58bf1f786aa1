"""The packages that `make test-upstream` installs: all of a training, without upper bounds.

python -m tests.newest_upstream             # prints them, one a line, as pip reads them
python -m tests.newest_upstream --versions  # prints what is installed of those that training stands on
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
TEST_TOOLS = {"pytest", "pytest-timeout"}
SHOWN = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "datasets", "bitsandbytes", "tokenizers")


def newest() -> list[str]:
    """The requirements of a run and of its tests, with lower bounds alone."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    found = [Requirement(each) for each in project["dependencies"]]
    extras = project["optional-dependencies"]
    found += map(Requirement, extras["train"])
    found += [each for each in map(Requirement, extras["dev"]) if each.name in TEST_TOOLS]
    for each in found:
        each.specifier = SpecifierSet(",".join(str(bound) for bound in each.specifier if bound.operator == ">="))
    return [str(each) for each in found]


if __name__ == "__main__":
    names = SHOWN if "--versions" in sys.argv else ()
    print("\n".join([f"{name} {version(name)}" for name in names] or newest()))
