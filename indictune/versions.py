"""The version of this package, and the recipes and scripts that are installed with it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from indictune.errors import Problems, missing_extra
from indictune.upstream import versions_of

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
FOLDER = _PACKAGE / "shipped"  # in a checkout, links to the folders of the repository


def versions_of_steps() -> dict[str, str]:
    """The versions of the packages that compute the steps of a run, ours included."""
    packages = ("torch", "transformers", "accelerate", "deepspeed", "peft")
    return {"indictune": __version__, **versions_of(packages)}  # ours need not be installed


@functools.cache
def code_digest() -> str:
    """Digest of all files of our code. Two commits have the same version, but not the same digest."""
    digest = hashlib.sha256()
    files = {path.relative_to(_PACKAGE): path for kind in ("py", "toml") for path in _PACKAGE.rglob(f"*.{kind}")}
    for name in sorted(files):
        if name.parts[0] != "shipped":  # links in a checkout, files in a wheel
            digest.update(f"{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()


def check_extra(verb: str, extra: str, *packages: str) -> None:
    """Refuse a verb whose extra is not installed."""
    Problems(missing_extra("indictune", verb, extra, *packages)).raise_any()


def shipped(folder: str, pattern: str) -> dict[str, Path]:
    """The files of a folder such as `recipes`, by their path below `shipped/`, such as `recipes/llama/demo.yaml`."""
    return {str(path.relative_to(FOLDER)): path for path in sorted((FOLDER / folder).glob(pattern))}


def recipes() -> dict[str, Path]:
    """All recipes."""
    return shipped("recipes", "*/*.yaml")


def everything() -> dict[str, Path]:
    """All files, folder by folder; the recipes first."""
    folders = sorted(path.name for path in FOLDER.iterdir() if path.name != "recipes")
    rest = {name: path for folder in folders for name, path in shipped(folder, "*.*").items()}
    rest |= shipped("scripts", "*/*.sbatch") | shipped("scripts", "*/*.yaml")
    return recipes() | {name: path for name, path in rest.items() if path.is_file()}


def as_seen_from_here(path: Path) -> Path:
    """The short path of an installed file in a checkout that is the current folder, else the whole one."""
    short = path.relative_to(FOLDER)
    return short if short.is_file() and short.samefile(path) else path


def strategies() -> dict[str, Path]:
    """All strategy files, by the name that `--strategy` takes."""
    return {path.stem: path for path in shipped("accelerate_configs", "*.yaml").values()}


def script(name: str) -> Path:
    """A training script."""
    return FOLDER / "scripts" / name
