"""The server: its address, its limits, and its run until a signal stops it."""

from __future__ import annotations

import errno
import ipaddress
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indictune.console_text import printable
from indictune.errors import Problem, UserError, problem

_SHUTDOWN_S = 30  # for clients that do not finish their request


class _Server(uvicorn.Server):
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

    Says so if other machines reach the address of the bound socket `listener`. `ready` is what is printed of the URL
    when it listens.
    """
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        print("Anybody who reaches this address can use the model.", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
    _Server(config, ready).run([listener])


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; a `UserError` if it is taken, or is none of this machine."""
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


_MINUTE_S = 60.0
_REMEMBERED = 10_000  # clients


class RefusedError(HTTPException):  # FastAPI turns other errors while it reads a body into status 400
    """A request that gets no answer but the reason."""

    def __init__(self, status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, str(problem), headers)
        self.problem = problem

    def response(self) -> JSONResponse:
        """As the client gets it."""
        return refusal(self.status_code, self.problem.code, str(self.problem), self.headers)


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The form of all errors."""
    return JSONResponse({"code": code, "message": message.removesuffix(f" [{code}]")}, status, headers)


class Rate:
    """Requests a minute of each client. An idle client may send those of a minute at once."""

    def __init__(self, per_minute: int) -> None:
        self._interval_s = _MINUTE_S / per_minute
        self._used_until: dict[str, float] = {}  # when the client has spent no request

    def wait_s(self, client: str, now: float) -> float:
        """Count a request; or how long the client must wait for the next one, if it has spent its minute."""
        used_until = max(self._used_until.get(client, now), now)
        wait_s = used_until + self._interval_s - now - _MINUTE_S
        if wait_s > 1e-6:  # the sum of many intervals is not exact
            return wait_s
        if len(self._used_until) >= _REMEMBERED:
            self._used_until = {each: until for each, until in self._used_until.items() if until > now}
        self._used_until[client] = used_until + self._interval_s
        return 0.0


class Limits:
    """ASGI middleware that refuses POST requests over the rate of their client (0 for none) or over a size."""

    def __init__(self, app: ASGIApp, max_bytes: int, per_minute: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._per_minute = per_minute
        self._rate = Rate(per_minute) if per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._check_rate(scope)
            announced = Headers(scope=scope).get("content-length", "")
            self._check_bytes(int(announced) if announced.isdecimal() else 0)
        except RefusedError as refused:
            await refused.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _check_rate(self, scope: Scope) -> None:
        client = (scope["client"] or [""])[0]
        wait_s = self._rate.wait_s(client, time.monotonic()) if self._rate else 0
        if wait_s:
            seconds = math.ceil(wait_s)
            found = problem("too-many-requests", value=self._per_minute, seconds=seconds)
            raise RefusedError(429, found, {"Retry-After": str(seconds)})

    def _check_bytes(self, number: int) -> None:
        if number > self._max_bytes:
            found = problem("request-too-large", value=self._max_bytes)
            raise RefusedError(413, found, {"Connection": "close"})  # the rest is not read

    def _counted(self, receive: Receive) -> Receive:
        """A body may be longer than its headers say, or come in chunks without a length."""
        number = 0

        async def counted() -> Message:
            nonlocal number
            message = await receive()
            number += len(message.get("body", b""))
            self._check_bytes(number)
            return message

        return counted
