"""The map of the code: the files of each package, and every file with the first line of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESIGN = ROOT / "docs/design.md"
_INTRODUCTION = """\
# Map of the code

Every file of `indictune/`, with what it is. The [design](design.md) says which package may import which.
"""
_ROW = re.compile(r"^\| `indictune/(?P<package>\w*)` \| (?P<what>[^|]+) \|(?:[^|\n]*\|)?$", re.MULTILINE)


def map_page() -> str:
    """The page of all files, a heading for each folder."""
    folders = sorted({path.parent for path in _files(ROOT / "indictune")})
    return _INTRODUCTION + "".join(_section(folder) for folder in folders)


def with_files() -> str:
    """`docs/design.md`, whose table names the files of each package."""
    package = ROOT / "indictune"
    text = DESIGN.read_text(encoding="utf-8")
    return _ROW.sub(lambda row: f"| `indictune/{row[1]}` | {row[2]} | {_names(package / row[1])} |", text)


def _section(folder: Path) -> str:
    rows = [f"| `{path.name}` | {_first_line(path)} |\n" for path in sorted(folder.glob("*.py")) if _holds_code(path)]
    title = f"\n## `{folder.relative_to(ROOT)}/`\n\n{_first_line(folder / '__init__.py')}\n\n"
    return title + "| file | what it is |\n|---|---|\n" + "".join(rows)


def _names(package: Path) -> str:
    """The files of a package; those of the package itself where it is `indictune`."""
    own = package.glob("*.py") if package.name == "indictune" else _files(package)
    names = [str(path.relative_to(package).with_suffix("")) for path in sorted(own) if path.name != "__init__.py"]
    return ", ".join(f"`{name}`" for name in names)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "shipped" not in path.parts]


def _holds_code(path: Path) -> bool:
    return len(ast.parse(path.read_text(encoding="utf-8")).body) > 1 or path.name != "__init__.py"


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
