"""Versions of installed packages, and the extras that bring the missing ones."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from indictune.errors import UserError

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
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
    """Refuse a verb whose extra is not installed.

    Raises:
        UserError: `extra-missing`.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError("extra-missing", f"indictune {verb}", extra=extra, packages=", ".join(missing))
