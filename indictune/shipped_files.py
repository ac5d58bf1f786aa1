"""Recipes, strategy files and scripts that are installed with the package."""

from __future__ import annotations

from pathlib import Path

# In a checkout, links to the folders of the repository.
FOLDER = Path(__file__).resolve().parent / "shipped"


def shipped(folder: str, pattern: str) -> dict[str, Path]:
    """The files of a folder such as `recipes`, by their path below `shipped/`, such as `recipes/llama/demo.yaml`."""
    return {str(path.relative_to(FOLDER)): path for path in sorted((FOLDER / folder).glob(pattern))}


def everything() -> dict[str, Path]:
    """All files, folder by folder; the recipes first."""
    folders = sorted(path.name for path in FOLDER.iterdir() if path.name != "recipes")
    rest = {name: path for folder in folders for name, path in shipped(folder, "*.*").items()}
    rest |= shipped("scripts", "slurm/*.sbatch")
    return recipes() | {name: path for name, path in rest.items() if path.is_file()}


def as_seen_from_here(path: Path) -> Path:
    """The short path of an installed file in a checkout that is the current folder, else the whole one."""
    short = path.relative_to(FOLDER)
    return short if short.is_file() and short.samefile(path) else path


def recipes() -> dict[str, Path]:
    """All recipes."""
    return shipped("recipes", "*/*.yaml")


def strategies() -> dict[str, Path]:
    """All strategy files, by the name that `--strategy` takes."""
    return {path.stem: path for path in shipped("accelerate_configs", "*.yaml").values()}


def script(name: str) -> Path:
    """A training script."""
    return FOLDER / "scripts" / name
