"""The address that a server listens on, and the server, which runs until a signal stops it."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from indictune.console_text import printable
from indictune.errors import UserError

_SHUTDOWN_S = 30  # for clients that do not finish their request


class _Server(uvicorn.Server):
    """Reports its address when it listens.

    Args:
        config: of uvicorn.
        ready: the report of an URL.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], str]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(printable(self._ready(url)), flush=True)


def run_server(app: FastAPI, listener: socket.socket, ready: Callable[[str], str]) -> None:
    """Answer requests until SIGINT or SIGTERM. Requests that were accepted are answered first.

    Args:
        app: answers.
        listener: a bound socket.
        ready: the report of an URL, printed when it listens.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
    _Server(config, ready).run([listener])


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Raises:
        UserError: the address is taken, or is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError("host-unknown", "--host", host, reason=error.strerror) from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # soon after the last server
        made.bind(address)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError("host-unknown", "--host", host, reason=error.strerror) from error
        raise UserError("port-not-free", "--port", port, reason=error.strerror) from error
    return made


def warn_of_others(listener: socket.socket) -> None:
    """Say so if other machines reach the address."""
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        print("Anybody who reaches this address can use the model.", file=sys.stderr)
