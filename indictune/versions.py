"""Which versions of packages a run has."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from indictune import __version__

# By which steps are computed.
_OF_STEPS = ("torch", "transformers", "accelerate", "deepspeed", "peft")


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """By name, of those that are installed: DeepSpeed and bitsandbytes are so on Linux alone."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def versions_of_steps() -> dict[str, str]:
    """Of what computes the steps of a run, by name."""
    return {"indictune": __version__, **versions_of(_OF_STEPS)}  # ours need not be installed, but lie there
