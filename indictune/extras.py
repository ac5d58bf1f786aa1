"""Packages that only some verbs need: each comes with an extra of the package."""

from __future__ import annotations

from importlib.util import find_spec

from indictune.errors import UserError


def check_extra(verb: str, extra: str, *packages: str) -> None:
    """Refuse a verb whose extra is not installed.

    Raises:
        UserError: `extra-missing`.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError("extra-missing", f"indictune {verb}", extra=extra, packages=", ".join(missing))
