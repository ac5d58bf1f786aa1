"""`indictune serve`: the same labels over HTTP, for many clients at once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from indictune.cli import main
from indictune.commands.serve import ServeFlags
from indictune.models import builtin
from indictune.prediction.labelled_rows import label_texts
from indictune.prediction.served_classifier import load_served_classifier
from indictune.serving.app import create_app
from tests.first_hour.saved_models import saved_classifier
from tests.ranks.launching import free_port, running

WORDS = ["यह", "फिल्म", "बहुत", "अच्छी", "थी", "ఈ", "సినిమా", "చాలా", "బాగుంది", "worst", "MOVIE", "ever", "😂"]
TEXTS = [f"{WORDS[n % 12]} {WORDS[n * 7 % 12]} {WORDS[n * 5 % 11]} {n}" for n in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("served") / "tweets")


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[str, Any]]:
    """The address of a server, when it answers, and its process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["indictune/__main__.py", "serve", str(model), "--port", str(port), *flags]
    with running(command, environment) as process:
        for _ in range(1000):
            try:
                httpx2.get(f"{url}/health")
                break
            except httpx2.ConnectError:
                time.sleep(0.02)
        yield url, process


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving(model) as (address, _):
        yield address


def asked(url: str, texts: list[str]) -> list[dict[str, Any]]:
    answer = httpx2.post(f"{url}/predict", json={"texts": texts}, timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["predictions"])


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [(row["text"], row["label"], row["language"]) for row in found] == [
        (row["text"], row["label"], row["language"]) for row in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):  # scores depend a little on the batch they are computed in
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-4)


def test_labels_scores_and_languages_are_those_of_predict(url: str, model: Path) -> None:
    texts = [*TEXTS[:20], "", "word " * 700, "@user http://a.b", "a\u0000b"]
    expected = label_texts(model, texts)
    assert expected[20]["label"] is None
    assert_same(asked(url, texts), expected)


@pytest.mark.more
def test_200_connections_at_once_lose_nothing(url: str, model: Path) -> None:
    expected = {row["text"]: row for row in label_texts(model, TEXTS)}

    async def all_at_once() -> list[httpx2.Response]:
        everything = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(base_url=url, limits=everything, timeout=60) as client:
            return await asyncio.gather(*(client.post("/predict", json={"texts": [text]}) for text in TEXTS))

    answers = asyncio.run(all_at_once())
    assert {answer.status_code for answer in answers} == {200}
    found = [row for answer in answers for row in answer.json()["predictions"]]
    assert_same(found, [expected[text] for text in TEXTS])


def test_health_names_the_model_and_not_its_folder(url: str) -> None:
    found = httpx2.get(f"{url}/health").json()
    assert found == {"status": "ok", "model": "tweets", "labels": ["anger", "joy", "neutral"], "waiting_texts": 0}


def test_the_page_describes_the_interface_and_needs_no_other_server(url: str) -> None:
    paths = httpx2.get(f"{url}/openapi.json").json()["paths"]
    assert (set(paths), set(paths["/predict"])) == ({"/predict", "/health", "/ready", "/metrics"}, {"post"})
    page = httpx2.get(f"{url}/docs").text
    sources = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(sources) >= 2
    for each in sources:
        assert each.startswith("/")
        assert httpx2.get(f"{url}{each}").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ('{"texts": ["a"]', 422, "request-invalid"),
        ('{"texts": "a"}', 422, "request-invalid"),
        ('{"texts": []}', 422, "request-invalid"),
        ('{"texts": ["\\ud800"]}', 422, "request-invalid"),
        ('{"texts": ["a"], "txets": []}', 422, "request-invalid"),
        ('{"texts": [%s"a"]}' % ('"a",' * 256), 413, "too-many-texts"),
        ('{"texts": ["%s"]}' % ("a" * 10_001), 413, "text-too-long"),
        ('{"texts": ["%s"]}' % ("a" * 1_000_000), 413, "request-too-large"),
    ],
)
def test_a_wrong_request_gets_a_plain_error(url: str, body: str, status: int, code: str) -> None:
    answer = httpx2.post(f"{url}/predict", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert len(answer.json()["message"]) < 200
    assert httpx2.get(f"{url}/health").status_code == 200


def test_the_place_where_json_breaks_is_named(url: str) -> None:
    for body, place in (("x", "1"), ('{"texts": ["a"]', "16")):
        answer = httpx2.post(f"{url}/predict", content=body, headers={"Content-Type": "application/json"})
        assert re.findall(r"JSON.*character (\d+)", answer.json()["message"]) == [place]
        assert not answer.json()["message"][0].isdigit()


def test_a_large_body_without_a_length_is_refused_like_others(model: Path) -> None:
    args = ServeFlags(model=str(model), max_request_bytes=1_000)
    app = create_app(load_served_classifier(args), args.name, args)

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"texts": ["'
        for _ in range(11):
            yield b"a" * 100

    async def answer() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/predict", content=chunks(), headers=headers)

    found = asyncio.run(answer())
    assert (found.status_code, found.json()["code"]) == (413, "request-too-large")


def test_other_paths_and_methods_get_an_error_of_the_same_form(url: str) -> None:
    assert httpx2.get(f"{url}/no").json()["code"] == "http-404"
    assert httpx2.get(f"{url}/predict").json()["code"] == "http-405"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_server_answers_what_it_has_accepted(model: Path, number: signal.Signals) -> None:
    with serving(model, "--max_batch_size", "1") as (url, process), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(asked, url, TEXTS[:80]) for _ in range(4)]
        while httpx2.get(f"{url}/health").json()["waiting_texts"] <= 3 * 80:  # until all four are accepted
            assert not any(each.done() for each in answers)
        process.send_signal(number)
        assert [[row["text"] for row in each.result()] for each in answers] == [TEXTS[:80]] * 4
        assert process.wait(30) == 0


def refusals(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The codes that the command ends with."""
    assert main(["serve", *words]) == 2
    return re.findall(r"\[([\w-]+)\]$", capsys.readouterr().err, flags=re.MULTILINE)


@pytest.fixture
def unfinished(tmp_path: Path) -> str:
    """The folder of a run that has no model yet."""
    (tmp_path / "logs").mkdir()
    return str(tmp_path)


def test_a_wrong_address_and_model_are_refused_together(unfinished: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refusals(capsys, unfinished, "--port", port) == ["port-not-free", "run-not-finished"]
    assert refusals(capsys, unfinished, "--host", "192.0.2.1") == ["host-unknown", "run-not-finished"]
    assert refusals(capsys, unfinished, "--host", "no such host") == ["host-unknown", "run-not-finished"]
    llama = builtin.resolve("builtin:tiny-indic-llama")
    assert refusals(capsys, str(llama), "--port", "0") == ["predict-of-language-model"]


def test_all_flags_are_checked_at_once(unfinished: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusals(capsys) == ["argument-missing"]
    wrong = ["--port", "70000", "--max_texts", "20000"]
    assert refusals(capsys, unfinished, *wrong) == ["port-unknown", "fewer-wait-than-come"]


def test_proxies_and_keys_are_checked_before_the_model_is_read(
    tmp_path: Path, unfinished: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        refusals(capsys, unfinished, "--trusted_proxy", "10.0.0.1", "10.0.0.1/8", "*") == ["proxy-not-an-address"] * 2
    )
    (tmp_path / "keys").write_text("0123456789abcdef\nshort\n")
    for name, code in (("keys", "api-key-short"), ("none", "unreadable")):
        flags = ("--port", "0", "--api_key_file", str(tmp_path / name))
        assert refusals(capsys, unfinished, *flags) == [code, "run-not-finished"]
