"""Versions of installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

_OF_STEPS = ("torch", "transformers", "accelerate", "deepspeed", "peft")


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, without packages that are not installed: some exist on Linux only."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def versions_of_steps() -> dict[str, str]:
    """The versions of the packages that compute the steps of a run, ours included."""
    return {"indictune": __version__, **versions_of(_OF_STEPS)}  # ours need not be installed
