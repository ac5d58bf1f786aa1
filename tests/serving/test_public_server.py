"""What others may do to a server that all networks reach. It runs on loopback, with 256 descriptors."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.ranks.launching import free_port, running
from tests.serving.slow_server import BODY_S, HEAD_S, IDLE_S

SLOW_S = 0.02  # the model's time for a text
HERE, PROXY, OTHER = "127.0.0.1", "127.0.0.9", "127.0.0.2"  # all of them are this machine
KEY = "0123456789abcdef"


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[int, Any]]:
    """The port of a server, when it answers, and its process."""
    port = free_port()
    (folder / "config.json").touch()  # as a finished run has it
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["tests/serving/slow_server.py", str(SLOW_S), str(folder), "--port", str(port), *flags]
    with running(command, environment) as process:
        while True:
            try:
                socket.create_connection((HERE, port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.02)
        yield port, process


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another-key-of-ours\n{KEY}\n")
    flags = ("--api_key_file", str(keys), "--trusted_proxy", PROXY, "--requests_per_minute", "100")
    with served(keys.parent, *flags, "--request_timeout", "2", "--allowed_hosts", "*.example.org") as (found, _):
        yield found


def connection(port: int, source: str = HERE, **settings: Any) -> socket.socket:
    return socket.create_connection((HERE, port), timeout=20, source_address=(source, 0))


def request(texts: Sequence[str] = ("a",), path: str = "/predict", **headers: str) -> bytes:
    body = json.dumps({"texts": texts}).encode() if path == "/predict" else b""
    given = {
        "Host": "localhost", "Authorization": f"Bearer {KEY}", "Content-Type": "application/json",
        "Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()},
    }  # fmt: skip
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def all_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    while part := client.recv(65_536):
        found += part
    return found


def send_slowly(client: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.sendall(b"GET")
        time.sleep(0.1)


def answer(port: int, sent: bytes, source: str = HERE) -> httpx2.Response:
    """Of a request by itself."""
    with connection(port, source) as client:
        client.sendall(sent.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        return parsed(all_of(client))


def parsed(found: bytes) -> httpx2.Response:
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(each.split(": ", 1) for each in lines)
    return httpx2.Response(int(first.split()[1]), headers=headers, content=body)


def is_served(port: int) -> bool:
    try:
        return answer(port, request(path="/health")).status_code == 200
    except ConnectionResetError:  # the request came when the server had looked for it: closing resets the connection
        return False


def test_290_silent_connections_are_closed_and_meanwhile_others_are_told_to_wait(tmp_path: Path) -> None:
    with served(tmp_path) as (port, process):
        with ExitStack() as silent:
            for _ in range(290):
                silent.enter_context(closing(connection(port)))
            refused = answer(port, request(path="/health"))
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["code"] == "server-busy"
            end = time.monotonic() + HEAD_S + 2
            while not is_served(port):
                assert time.monotonic() < end
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
        assert len(said) < 2_000


def test_connections_that_were_answered_and_stay_make_room(tmp_path: Path) -> None:
    with served(tmp_path) as (port, _), ExitStack() as staying:
        for _ in range(250):
            client = staying.enter_context(closing(connection(port)))
            client.sendall(request(path="/health"))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
        assert answer(port, request(path="/health")).status_code == 200


@pytest.mark.parametrize(
    ("begun", "seconds"), [(b"GET /health HTTP/1.1\r\nX-Name: ", HEAD_S), (request(["a" * 1000])[:-900], BODY_S)]
)
def test_a_head_and_a_body_that_come_byte_by_byte_have_an_end(port: int, begun: bytes, seconds: float) -> None:
    with connection(port) as client:
        client.sendall(begun)
        began = time.monotonic()
        client.settimeout(0.05)
        found = b""
        while not found and time.monotonic() < began + 5:
            client.sendall(b"a")
            try:
                found = client.recv(65_536)
            except TimeoutError:
                continue
        assert (parsed(found).status_code, parsed(found).json()["code"]) == (408, "request-timed-out")
        assert seconds - 0.1 < time.monotonic() - began < seconds + 1


def test_an_idle_connection_is_closed(port: int) -> None:
    with connection(port) as client:
        client.sendall(request(path="/health"))
        began = time.monotonic()
        assert parsed(all_of(client)).status_code == 200
        assert IDLE_S - 0.1 < time.monotonic() - began < IDLE_S + 1


@pytest.mark.more
def test_a_client_that_does_not_read_its_answer_is_cut(port: int) -> None:
    with connection(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        for _ in range(40):  # answers of 1.5 MB
            client.sendall(request(path="/static-offline-docs/swagger-ui-bundle.js"))
        time.sleep(1)
        with pytest.raises(ConnectionError):
            send_slowly(client, 12)


def test_a_request_ends_at_its_deadline_and_its_work_is_dropped(port: int) -> None:
    began = time.monotonic()
    late = answer(port, request(["a"] * 256))
    assert (late.status_code, late.json()["code"]) == (503, "request-timed-out")
    assert 1.9 < time.monotonic() - began < 3
    assert answer(port, request(path="/health")).json()["waiting_texts"] == 0
    assert answer(port, request()).status_code == 200


def test_work_of_clients_that_went_away_is_dropped(tmp_path: Path) -> None:
    with served(tmp_path, "--max_batch_size", "16") as (port, _):
        gone = [connection(port) for _ in range(15)]
        for client in gone:
            client.sendall(request(["a"] * 256))  # 77 s of work
        while answer(port, request(path="/health")).json()["waiting_texts"] < 15 * 240:
            time.sleep(0.02)
        for client in gone:
            client.close()
        began = time.monotonic()
        assert answer(port, request()).status_code == 200
        assert time.monotonic() - began < 2


def test_texts_are_shared_between_addresses(tmp_path: Path) -> None:
    with served(tmp_path, "--max_batch_size", "16") as (port, _), ExitStack() as many:
        for _ in range(60):
            many.enter_context(closing(client := connection(port)))
            client.sendall(request(["a"] * 256))  # 307 s of work, of which half can wait
        while answer(port, request(path="/health")).json()["waiting_texts"] < 4_800:
            time.sleep(0.02)
        began = time.monotonic()
        assert answer(port, request(), OTHER).status_code == 200
        assert time.monotonic() - began < 2
        assert answer(port, request(["a"] * 256)).json()["code"] == "server-busy"


def test_sigterm_answers_what_it_can_and_refuses_the_rest_with_a_code(tmp_path: Path) -> None:
    with served(tmp_path, "--drain_seconds", "1", "--max_batch_size", "8") as (port, process), ExitStack() as stack:
        clients = [stack.enter_context(closing(connection(port))) for _ in range(100)]
        for client in clients:
            client.sendall(request(["a"]))  # 2 s of work in all
        assert answer(port, request(path="/health")).json()["waiting_texts"] > 60
        process.send_signal(signal.SIGTERM)
        found = [parsed(all_of(client)) for client in clients]
        refused = [each for each in found if each.status_code != 200]
        assert 0 < len(refused) < 100
        assert {(each.status_code, each.json()["code"], each.headers["Retry-After"]) for each in refused} == {
            (503, "server-stops", "1")
        }
        assert process.wait(10) == 3


def test_a_forwarded_address_counts_from_the_trusted_proxy_alone(port: int) -> None:
    def refused(source: str, addresses: Iterator[str]) -> int:
        """Of 150 requests, where 100 a minute are allowed."""
        with httpx2.Client(transport=httpx2.HTTPTransport(local_address=source)) as client:
            url, key = f"http://{HERE}:{port}/predict", {"Authorization": f"Bearer {KEY}"}
            statuses = [
                client.post(url, json={}, headers={**key, "X-Forwarded-For": next(addresses)}).status_code
                for _ in range(150)
            ]
        return statuses.count(429)

    assert refused(OTHER, (f"10.0.0.{number % 250}" for number in range(150))) >= 40
    assert refused(PROXY, (f"10.0.0.{number % 250}" for number in range(150))) == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 400), ("localhost.evil.example", 400), ("[", 400), ("", 400), ("127.0.0.1:1", 200),
        ("LOCALHOST", 200), ("labels.example.org:8000", 200), ("[::1]:80", 200), ("example.org", 400),
    ],
)  # fmt: skip
def test_the_host_must_be_one_of_the_server(port: int, host: str, status: int) -> None:
    found = answer(port, request(path="/health", Host=host))
    assert found.status_code == status
    assert status == 200 or found.json()["code"] == "host-not-allowed"


def test_a_key_is_needed_for_labels_and_numbers_but_not_for_probes(port: int) -> None:
    for path in ("/predict", "/metrics"):
        for wrong in ("", KEY, "Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer é"):
            found = answer(port, request(path=path, Authorization=wrong), "127.0.0.3")
            assert (found.status_code, found.json()["code"]) == (401, "api-key-wrong")
            assert found.headers["WWW-Authenticate"] == "Bearer"
        assert answer(port, request(path=path), PROXY).status_code == 200
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert answer(port, request(path=path, Authorization="")).status_code == 200


def test_metrics_and_the_log_count_answers_without_words_of_clients(tmp_path: Path) -> None:
    with served(tmp_path) as (port, process):
        assert answer(port, request(["secret", "secret"])).status_code == 200
        assert answer(port, request(path="/secret?text=secret")).status_code == 404
        assert answer(port, request(path="/ready")).json() == {"status": "ready"}
        found = answer(port, request(path="/metrics")).text.splitlines()
        assert "indictune_texts_total 2.0" in found
        assert "indictune_waiting_texts 0.0" in found
        assert 'indictune_request_seconds_count{path="/predict",status="200"} 1.0' in found
        assert 'indictune_request_seconds_count{path="other",status="404"} 1.0' in found
        assert any(line.startswith("process_open_fds") for line in found)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        _, said = process.communicate()
    assert "secret" not in said
    lines = [line.split()[2:5] for line in said.splitlines()]
    assert lines == [
        [HERE, "/predict", "200"],
        [HERE, "other", "404"],
        [HERE, "/ready", "200"],
        [HERE, "/metrics", "200"],
    ]


@pytest.mark.more
def test_a_server_whose_queue_is_full_is_alive_and_not_ready(tmp_path: Path) -> None:
    with served(tmp_path, "--max_waiting_texts", "300") as (port, _), closing(connection(port)) as client:
        client.sendall(request(["a"] * 250))
        while answer(port, request(path="/health")).json()["waiting_texts"] < 100:
            time.sleep(0.02)
        assert answer(port, request(path="/ready")).status_code == 503
        assert answer(port, request(path="/health")).status_code == 200
