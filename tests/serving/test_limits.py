"""Requests that are too large or too many, and batches of several requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from indictune.config.shared_arguments import RequestLimits
from indictune.serving.app import Batches
from indictune.serving.server import Limits, Rate, RefusedError

Answer = tuple[int, str, str | None]


def test_a_client_may_send_the_requests_of_a_minute_at_once_and_then_one_by_one() -> None:
    rate = Rate(3)
    assert [rate.wait_s("a", 100.0) for _ in range(4)] == [0, 0, 0, pytest.approx(20)]
    assert rate.wait_s("b", 100.0) == 0
    assert rate.wait_s("a", 119.0) == pytest.approx(1)
    assert [rate.wait_s("a", 120.5) for _ in range(2)] == [0, pytest.approx(19.5)]
    assert [rate.wait_s("a", 1000.0) for _ in range(4)] == [0, 0, 0, pytest.approx(20)]


def test_clients_that_are_idle_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indictune.serving.server._REMEMBERED", 10)
    rate = Rate(1)
    for number in range(100):
        assert rate.wait_s(str(number), 61.0 * number) == 0
    assert len(rate._used_until) <= 10


async def answers(bodies: Sequence[Any], per_minute: int = 0, **more: Any) -> list[Answer]:
    """Status, text and `Retry-After` of an application that repeats a body of at most 10 bytes."""

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    app = Starlette(routes=[Route("/", echo, methods=["POST", "GET"])])
    app.add_exception_handler(RefusedError, lambda _, error: error.response())
    limits = RequestLimits(max_request_bytes=10, requests_per_minute=per_minute)
    app.add_middleware(Limits, limits=limits, keys=(), observe=lambda *_: None)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here", **more) as client:
        found = [await client.post("/", content=body) for body in bodies]
        found.append(await client.get("/"))
    return [(each.status_code, each.text, each.headers.get("Retry-After")) for each in found]


async def chunks() -> AsyncIterator[bytes]:
    for _ in range(4):
        yield b"abc"


def test_a_large_body_is_refused_with_and_without_a_length() -> None:
    found = asyncio.run(answers([b"0123456789", b"0123456789a", chunks()]))
    assert found[0] == (200, "0123456789", None)
    for status, text, _ in found[1:3]:
        assert status == 413
        assert '"code":"request-too-large"' in text


def test_a_client_over_its_rate_learns_how_long_to_wait_and_may_still_ask_for_health() -> None:
    found = asyncio.run(answers([b"a", b"b", b"c"], per_minute=2))
    assert [status for status, _, _ in found] == [200, 200, 429, 200]
    assert found[2][2] == "30"
    assert '"code":"too-many-requests"' in found[2][1]


class Model:
    """Answers a text with its length, when `free` is set. `batches` has what came together."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        self.free.wait(5)
        self.batches.append(list(texts))
        if "bad" in texts:
            raise ValueError("bad")
        return [{"length": len(text)} for text in texts]


async def labelled(
    model: Model, requests: Sequence[Sequence[str]], max_waiting: int = 100, clients: str = "aaaa"
) -> list[Any]:
    """The answers to requests of some clients that come while the model is busy, or what they raised."""
    batches = Batches(model, 4, max_waiting)
    running = asyncio.create_task(batches.run())
    asked = [asyncio.create_task(batches.label(*each)) for each in zip(requests, clients, strict=False)]
    await asyncio.sleep(0.01)
    model.free.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    running.cancel()
    return found


def lengths(texts: Sequence[str]) -> list[dict[str, int]]:
    return [{"length": len(text)} for text in texts]


def test_requests_share_batches_and_each_gets_its_own_answers() -> None:
    model, requests = Model(), [["a", "bb"], ["ccc"], ["dddd", "e", "ff", "ggg", "hhhh", "i"], ["jj"]]
    assert asyncio.run(labelled(model, requests)) == [lengths(texts) for texts in requests]
    assert [text for batch in model.batches for text in batch] == [text for texts in requests for text in texts]
    assert [len(batch) for batch in model.batches] == [4, 4, 2]


def test_a_text_on_which_the_model_fails_spoils_no_other_request() -> None:
    first, second, third = asyncio.run(labelled(Model(), [["a"], ["ok", "bad"], ["bb"]]))
    assert (first, third) == (lengths(["a"]), lengths(["bb"]))
    assert isinstance(second, ValueError)


def test_a_full_queue_refuses_and_later_takes_again() -> None:
    found = asyncio.run(labelled(Model(), [["a", "b"], ["c", "d"], ["e"]], max_waiting=5))
    assert found[0] == lengths(["a", "b"])
    assert isinstance(found[1], RefusedError)
    assert found[2] == lengths(["e"])


def test_a_client_leaves_room_for_others() -> None:
    requests = [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    found = asyncio.run(labelled(Model(), requests, max_waiting=5, clients="1123"))
    assert [isinstance(each, RefusedError) for each in found] == [False, True, False, False]


def test_clients_take_turns_in_a_batch() -> None:
    model = Model()
    asyncio.run(labelled(model, [["a", "b", "c", "d", "e"], ["f"], ["g"], ["h", "i"]], clients="1123"))
    assert model.batches == [["a", "g", "h", "b"], ["i", "c", "d", "e"], ["f"]]


def test_texts_of_a_cancelled_request_are_not_labelled() -> None:
    async def cancelled() -> tuple[int, int]:
        batches = Batches(Model(), 4, 100)
        asked = [asyncio.create_task(batches.label(["a"] * 5, client)) for client in "112"]
        await asyncio.sleep(0)
        before = batches.waiting
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        return before, batches.waiting

    assert asyncio.run(cancelled()) == (15, 10)
