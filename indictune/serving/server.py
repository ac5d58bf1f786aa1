"""The server: its address, its connections, its limits, and its run until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import math
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from http import HTTPStatus

import h11
import psutil
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from indictune.config.shared_arguments import RequestLimits
from indictune.console_text import printable
from indictune.errors import Problem, UserError, problem

HEAD_S, BODY_S, IDLE_S = 10.0, 30.0, 75.0  # for the head of a request, its body, and the next request
_LAST_S = 5  # for clients to take an answer
_ACCEPTED_AT_ONCE = 16  # asyncio (Python 3.11) logs each of its tries without a descriptor, one for each of a backlog
_SPARE_DESCRIPTORS = 64  # for connections that are refused, and for files


class _Connection(H11Protocol):
    """A connection that ends if its client is slow, and at once, with status 503, if too many are open."""

    max_connections = 1
    answer_s = 0.0  # from the end of a request to the end of its answer
    _phase = ""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self.max_connections or self._close_idle():
            self._watch()
            return
        with suppress(OSError):  # what is not read when the connection is closed would reset it: no answer arrives
            os.read(transport.get_extra_info("socket").fileno(), 1 << 16)
        busy = problem("server-busy", value=self.max_connections, what="connections are open")
        self._end(RefusedError(503, busy, _RETRY))

    def _close_idle(self) -> bool:
        """Make room by closing a connection that waits for its next request; False if there is none."""
        for each in self.connections:
            if isinstance(each, _Connection) and each._phase == "idle":
                each._phase = "closing"
                each.transport.close()
                return True
        return False

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        self._phase = ""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """Set the timer of what the client, or the application, has to do now."""
        if self.conn.their_state is h11.SEND_BODY:
            phase, seconds = "body", BODY_S
        elif self.cycle is not None and not self.cycle.response_complete:
            phase, seconds = "answer", self.answer_s
        elif self.cycle is None or self.conn.trailing_data[0]:
            phase, seconds = "head", HEAD_S
        else:
            phase, seconds = "idle", IDLE_S
        if phase != self._phase:
            if self._timer is not None:
                self._timer.cancel()
            self._phase, self._timer = phase, self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._phase in ("head", "body") and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            seconds = HEAD_S if self._phase == "head" else BODY_S
            self._end(RefusedError(408, problem("request-timed-out", value=seconds, what=self._phase)))
        if self._phase == "answer" or self.transport.get_write_buffer_size():  # its client does not read
            self.transport.abort()
        self.transport.close()

    def _end(self, refused: RefusedError) -> None:
        """Answer past the application, and close."""
        response, status = refused.response(), HTTPStatus(refused.status_code)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), *(b"%b: %b" % each for each in headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[str], str], drain_seconds: float) -> None:
        super().__init__(config)
        self._ready = ready
        self._drain_seconds = drain_seconds
        self.unanswered = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(socket.SOMAXCONN)
            host, port = each.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(printable(self._ready(url)), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_of_drain = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up)
        await super().shutdown(sockets)
        end_of_drain.cancel()
        self.unanswered = self.unanswered or len(self.server_state.tasks)  # some, after a second Ctrl-C

    def _give_up(self) -> None:
        """Let `Limits` refuse what is not answered yet."""
        self.unanswered = len(self.server_state.tasks)
        for each in self.server_state.tasks:
            each.cancel()


def run_server(app: FastAPI, listener: socket.socket, ready: Callable[[str], str], limits: RequestLimits) -> int:
    """Answer requests until SIGINT or SIGTERM, and then those that were accepted.

    Says so if other machines reach the bound socket `listener` without a key. `ready` is what is printed of the URL
    when it listens. Returns how many requests were not answered within `drain_seconds`.
    """
    if not limits.api_key_file and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        print("Anybody who reaches this address can use the model.", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = (descriptors if descriptors >= 0 else 1 << 20) - psutil.Process().num_fds()
    _Connection.max_connections = max(1, free - _SPARE_DESCRIPTORS)
    _Connection.answer_s = limits.request_timeout + _LAST_S
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=math.ceil(IDLE_S),
        timeout_graceful_shutdown=limits.drain_seconds + _LAST_S,
        forwarded_allow_ips=limits.trusted_proxy,
    )
    server = _Server(config, ready, limits.drain_seconds)
    server.run([listener])
    return server.unanswered


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
_RETRY = {"Retry-After": "1"}
GUARDED = ("/predict", "/metrics")


def client_of(scope: Scope) -> str:
    """The address of the client."""
    return str((scope["client"] or [""])[0])


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
    """ASGI middleware: what a request needs to reach the application, and until when it is answered.

    Requests to `GUARDED` paths need one of the `keys`, if there are any. `observe` is called with the scope of each
    request, its status (499 if its client went away) and its seconds.
    """

    def __init__(
        self, app: ASGIApp, limits: RequestLimits, keys: Sequence[str], observe: Callable[[Scope, int, float], None]
    ) -> None:
        self._app = app
        self._limits = limits
        self._rate = Rate(limits.requests_per_minute) if limits.requests_per_minute else None
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._hosts = ["localhost", "127.0.0.1", "::1", *map(str.lower, limits.allowed_hosts)]
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self._answer_in_time(scope, receive, noted)
        except RefusedError as refused:
            if not status:
                await refused.response()(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            self._observe(scope, status or 499, time.monotonic() - began)

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer; stop it at the deadline, when the client goes away, or when the server stops."""
        task, is_gone, number = asyncio.current_task(), False, 0
        watcher: asyncio.Task[None] | None = None

        async def until_gone() -> None:
            nonlocal is_gone
            await receive()  # after the body there is nothing else
            is_gone = True
            assert task is not None
            task.cancel()

        async def counted() -> Message:
            """A body may be longer than its headers say, or come in chunks without a length."""
            nonlocal number, watcher
            message = await receive()
            number += len(message.get("body", b""))
            self._check_bytes(number)
            if not message.get("more_body"):
                watcher = asyncio.create_task(until_gone())
            return message

        try:
            async with asyncio.timeout(self._limits.request_timeout) as deadline:
                await self._app(scope, counted if scope["method"] == "POST" else receive, send)
        except TimeoutError:
            if not deadline.expired():
                raise
            found = problem("request-timed-out", value=self._limits.request_timeout, what="answer")
            raise RefusedError(503, found, _RETRY) from None
        except asyncio.CancelledError:
            if not is_gone:
                raise RefusedError(503, problem("server-stops"), _RETRY) from None
        finally:
            if watcher is not None:
                watcher.cancel()

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""), (scope["server"] or ["localhost"])[0])
        if scope["method"] == "POST":
            self._check_rate(scope)
        given = headers.get("authorization", "").encode("latin-1")
        needs_key = self._keys and scope["path"] in GUARDED
        if needs_key and not any(hmac.compare_digest(given, key) for key in self._keys):
            raise RefusedError(401, problem("api-key-wrong"), {"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST":
            announced = headers.get("content-length", "")
            self._check_bytes(int(announced) if announced.isdecimal() else 0)

    def _check_host(self, given: str, own_address: str) -> None:
        """Refuse a name that nobody gave this server: a page of another site may have made it resolve to it."""
        host = re.sub(r":\d*$", "", given).strip("[]").lower()
        if not any(fnmatchcase(host, each) for each in (*self._hosts, own_address)):
            raise RefusedError(400, problem("host-not-allowed", value=host[:100]))

    def _check_rate(self, scope: Scope) -> None:
        wait_s = self._rate.wait_s(client_of(scope), time.monotonic()) if self._rate else 0
        if wait_s:
            seconds = math.ceil(wait_s)
            found = problem("too-many-requests", value=self._limits.requests_per_minute, seconds=seconds)
            raise RefusedError(429, found, {"Retry-After": str(seconds)})

    def _check_bytes(self, number: int) -> None:
        if number > self._limits.max_request_bytes:
            found = problem("request-too-large", value=self._limits.max_request_bytes)
            raise RefusedError(413, found, {"Connection": "close"})  # the rest is not read
