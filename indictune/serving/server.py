"""Run an application until a signal stops it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from indictune.console_text import printable

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


def serve(app: FastAPI, listener: socket.socket, ready: Callable[[str], str]) -> None:
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
