"""Refuse requests that are too large or too many, before they are read."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indictune.errors import Problem, problem

_MINUTE_S = 60.0
_REMEMBERED = 10_000  # clients


class RefusedError(HTTPException):  # FastAPI turns other errors while it reads a body into status 400
    """A request that gets no answer but the reason.

    Args:
        status: of HTTP.
        problem: that the client reads.
        headers: of the response.
    """

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
    """Requests a minute of each client. An idle client may send those of a minute at once.

    Args:
        per_minute: requests.
    """

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
    """ASGI middleware that refuses POST requests over the rate of their client or over a size.

    Args:
        app: gets the other requests.
        max_bytes: of a request's body.
        per_minute: requests of a client; 0 for no limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, per_minute: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._per_minute = per_minute
        self._rate = Rate(per_minute) if per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why not."""
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
