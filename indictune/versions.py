"""Which versions of packages a run has."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """By name, of those that are installed: DeepSpeed and bitsandbytes are so on Linux alone."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
