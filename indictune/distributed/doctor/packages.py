"""Installed packages against the versions that indictune is tested with, and combinations that are known to be bad."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from indictune.distributed.doctor.lines import Line
from indictune.versions import __version__, versions_of

CHECK = "packages"

_SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes")


def package_lines(environ: Mapping[str, str], gpus: int, processes: int) -> list[Line]:
    """What is wrong with the packages of this process, or one line that is ok.

    Args:
        environ: of this process.
        gpus: that it sees.
        processes: of the launch.
    """
    found = [line for each in requirements() if (line := _line_of(each))]
    for fault in known_faults():
        asked = (not fault.get("gpu") or gpus > 0) and (not fault.get("several") or processes > 1)
        if asked and _matches(fault, environ):
            found.append(Line(CHECK, "warn", fault["found"], fault["cure"]))
    shown = ", ".join(f"{name} {number}" for name, number in versions_of(_SHOWN).items())
    ok = Line(CHECK, "ok", f"indictune {__version__}, python {platform.python_version()}, {shown}")
    return found or [ok]


def requirements() -> list[Requirement]:
    """The packages that indictune needs on this platform, with their versions.

    From its metadata; a checkout that is not installed has them in `pyproject.toml`.
    """
    try:
        lines = requires("indictune") or []
    except PackageNotFoundError:
        root = Path(str(resources.files("indictune"))).parent
        lines = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found = map(Requirement, lines)
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


@cache
def known_faults() -> list[dict[str, Any]]:
    """The entries of `known_faults.toml`."""
    text = resources.files("indictune.distributed.doctor").joinpath("known_faults.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["fault"])


def _line_of(needed: Requirement) -> Line | None:
    """What is wrong with one package."""
    cure = f'pip install "{needed.name}{needed.specifier}"'
    try:
        installed = version(needed.name)
    except PackageNotFoundError:
        return Line(CHECK, "fail", f"{needed.name} is not installed", cure)
    if needed.specifier.contains(installed, prereleases=True):
        return None
    return Line(CHECK, "warn", f"{needed.name} {installed} is not tested: expected {needed.specifier}", cure)


def _matches(fault: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    installed = versions_of(fault["packages"])
    has_packages = all(
        name in installed and SpecifierSet(asked).contains(installed[name], prereleases=True)
        for name, asked in fault["packages"].items()
    )
    given = ((environ.get(name, ""), asked) for name, asked in fault["variables"].items())
    return has_packages and all(value if asked == "*" else value == asked for value, asked in given)
