"""A Ray cluster: one that runs already, or one of this machine that starts with the command and ends with it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from indictune.errors import UserError

_EXTRA = "ray"
_CONNECT_S = 5.0


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A block in which this process is a driver of the cluster at an address, or at RAY_ADDRESS, else of a local one.

    Raises:
        UserError: Ray is not installed, or there is no cluster that it can join.
    """
    if find_spec("ray") is None:
        raise UserError("extra-missing", "--engine ray", extra=_EXTRA, packages="ray")
    given = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"address": given, "logging_level": logging.ERROR}
    if given is None:
        settings |= {"address": "local", "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else Ray (2.60) tries for minutes
    import ray  # reads these variables; takes seconds

    try:
        if given not in (None, "auto"):
            _check_listens(str(given))
        ray.init(**settings)
    except (OSError, ValueError, RuntimeError) as error:
        if given is None:
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        flag = "--ray_address" if address else "RAY_ADDRESS"
        raise UserError("no-ray-cluster", flag, given, reason=reason) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise an `OSError` or a `ValueError` if nobody listens there. Ray (2.60) itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("expected auto or HOST:PORT")
    socket.create_connection((host, int(port)), _CONNECT_S).close()
