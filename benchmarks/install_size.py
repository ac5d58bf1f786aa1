"""Bytes on disk of each install: `pip install indictune`, `indictune[train]` and `indictune[all]`.

    python -m benchmarks.install_size [--folder F]

Each is installed into one new environment on top of the one before, with the releases of constraints.txt and the torch
that pip finds. What an environment without any package has is not counted. Some gigabytes are downloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import venv
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table

ROOT = Path(__file__).resolve().parents[1]
INSTALLS = ("indictune", "indictune[train]", "indictune[all]")
SHOWN = 8  # largest folders of an install


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links take none."""
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return sum(each.stat().st_size for each in ([path] if path.is_file() else files) if not each.is_symlink())


def largest(site: Path) -> dict[str, int]:
    """The largest folders and files of the installed packages, with their bytes."""
    sizes = {each.name: size_of(each) for each in site.iterdir() if each.name not in ("pip", "setuptools")}
    return dict(sorted(sizes.items(), key=lambda size: -size[1])[:SHOWN])


def measured(folder: Path) -> list[dict[str, Any]]:
    """Each install, with its bytes, its number of packages and the torch that pip chose."""
    venv.create(folder / "venv", with_pip=True)
    python, empty = folder / "venv/bin/python", size_of(folder / "venv")
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    shutil.copytree(ROOT / "indictune", folder / "source/indictune")  # setuptools writes beside what it builds
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(folder / "source")], check=True)
    (wheel,) = folder.glob("indictune-*.whl")
    (site,) = (folder / "venv/lib").glob("python3*/site-packages")
    found = []
    for name in INSTALLS:
        asked = f"{wheel}{name.removeprefix('indictune')}"
        words = ["install", "--no-cache-dir", "--constraint", str(ROOT / "constraints.txt"), asked]
        subprocess.run([*pip, *words], env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
        versions = {each.name: each.version for each in distributions(path=[str(site)])}
        total = size_of(folder / "venv") - empty
        facts = {"bytes": total, "packages": len(versions.keys() - {"pip", "setuptools"}), "torch": versions["torch"]}
        found.append({"install": name, **facts, "largest": largest(site)})
        print(f"{name}: {total / 1e6:,.0f} MB", flush=True)
    return found


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on a disk with 5 GB; default: a temporary folder")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        found = measured(Path(folder))
    body = [[each["install"], f"{each['bytes'] / 1e6:,.0f}", str(each["packages"])] for each in found]
    print(table(["install", "MB", "packages"], body))
    print(f"written to {write_results('install-size', {'environment': environment(), 'installs': found})}")


if __name__ == "__main__":
    main()
