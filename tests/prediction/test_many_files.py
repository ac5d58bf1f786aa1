"""`indictune predict` on many files: what is unreadable, what changed, a store that fails for a while."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from indictune.cli import main
from indictune.prediction import stores
from indictune.prediction.served_classifier import Classifier
from tests.first_hour.saved_models import saved_classifier


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved_classifier(tmp_path_factory.mktemp("many")))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        pq.write_table(pa.table({"tweet": [f"अच्छी {name}{row}" for row in range(9)]}), folder / f"{name}.parquet")
    return folder


def texts_in(folder: Path) -> list[str]:
    return [row["text"] for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_an_unreadable_shard_is_named_and_the_others_go_on(
    model: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    whole = (shards / f"{damaged}.parquet").read_bytes()
    (shards / f"{damaged}.parquet").write_bytes(whole[:-20])
    command = ["predict", model, "--input_file", f"{shards}/*.parquet", "--output_file", f"{tmp_path}/out/"]
    assert main(command) == 2
    assert f"{damaged}.parquet" in capsys.readouterr().err
    assert texts_in(tmp_path / "out") == []
    command += ["--bad_rows", "quarantine"]
    assert main(command) == 2
    assert "[part-unreadable]" in capsys.readouterr().err
    assert texts_in(tmp_path / "out") == [f"अच्छी {name}{row}" for name in "abc" if name != damaged for row in range(9)]
    (shards / f"{damaged}.parquet").write_bytes(whole)
    assert main(command) == 0
    assert texts_in(tmp_path / "out") == [f"अच्छी {name}{row}" for name in "abc" for row in range(9)]
    assert json.loads((tmp_path / "out/_manifest.json").read_bytes())["rows"] == 27


def test_a_folder_of_other_labels_is_refused_and_stays(
    model: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", model, "--input_file", str(shards), "--output_file", f"{tmp_path}/out/"]
    assert main(command) == 0
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    pq.write_table(pa.table({"tweet": ["another text"]}), shards / "a.parquet")
    assert main(command) == 2
    assert "[output-of-another-run]" in capsys.readouterr().err
    assert main([*command[:-1], str(shards)]) == 2
    assert "[output-folder-not-empty]" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == kept


def test_a_folder_without_labels_stays_free(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], web: dict[str, Any]
) -> None:
    command = ["predict", model, "--input_file", web["url"].replace(".jsonl", ".parquet")]
    command += ["--output_file", f"{tmp_path}/out/"]
    web.update(times=0, body=b"no parquet")
    assert main(command) == 2
    assert "[rows-unreadable]" in capsys.readouterr().err
    file = io.BytesIO()
    pq.write_table(pa.table({"tweet": ["one"]}), file)
    web.update(body=file.getvalue())
    assert main(command) == 0
    assert texts_in(tmp_path / "out") == ["one"]


def test_labels_of_another_tokenizer_are_refused(model: str, shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    command = ["predict", str(copy), "--input_file", str(shards), "--output_file", f"{tmp_path}/out/"]
    assert main(command) == 0
    os.utime(copy / "tokenizer.json", (0, 0))
    assert main(command) == 2


def test_bad_rows_of_many_files_are_no_secret_on_standard_output(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        rows = "".join(f"{name}{row}{',more' if row == 3 else ''}\n" for row in range(200))
        (tmp_path / f"{name}.csv").write_text(f"tweet\n{rows}")
    command = ["predict", model, "--input_file", f"{tmp_path}/*.csv"]
    assert main(command) == 2
    assert "[field-count]" in capsys.readouterr().err
    assert main([*command, "--bad_rows", "quarantine"]) == 0
    said = capsys.readouterr()
    assert said.err.count("1 bad rows were left out") == 2
    assert len(said.out.splitlines()) == 398


def test_many_files_become_one_with_their_rejected_rows(model: str, tmp_path: Path) -> None:
    for name in "ab":
        rows = "".join(f"{name}{row}{',more' if row == 3 else ''}\n" for row in range(200))
        (tmp_path / f"in-{name}.csv").write_text(f"tweet\n{rows}")
    out = tmp_path / "out.jsonl"
    command = ["predict", model, "--input_file", f"{tmp_path}/in-*.csv", "--output_file", str(out)]
    assert main(command) == 2
    assert not out.exists()
    assert main([*command, "--bad_rows", "quarantine"]) == 0
    kept = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert kept == [f"{name}{row}" for name in "ab" for row in range(200) if row != 3]
    rejected = [json.loads(line) for line in Path(f"{out}.rejected.jsonl").read_text().splitlines()]
    assert [(Path(each["file"]).name, each["line"]) for each in rejected] == [("in-a.csv", 5), ("in-b.csv", 5)]


def test_batches_are_halved_when_memory_runs_out(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"tweet": [f"अच्छी फिल्म {row}" for row in range(500)]}), tmp_path / "in.parquet")
    command = ["predict", model, "--input_file", str(tmp_path / "in.parquet"), "--output_file"]
    assert main([*command, f"{tmp_path}/enough/"]) == 0
    forward = Classifier._forward

    def with_little(self: Classifier, tokens: Any, numbers: Any) -> torch.Tensor:
        if len(numbers) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, numbers)

    monkeypatch.setattr(Classifier, "_forward", with_little)
    assert main([*command, f"{tmp_path}/little/"]) == 0
    assert "out of memory" in capsys.readouterr().err
    few, many = (pq.read_table(tmp_path / name / "part-00000-in-rows-0-499.parquet") for name in ("little", "enough"))
    assert few["label"].equals(many["label"])


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A web server that answers with a status for a while, and then with lines of JSON."""
    body = b'{"tweet": "one"}\n{"tweet": "two"}\n'
    state: dict[str, Any] = {"status": 503, "after": 0, "times": 4, "asked": 0, "body": body}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state["asked"] += 1
            fails = state["asked"] in range(state["after"] + 1, state["after"] + state["times"] + 1)
            body, part = b"" if fails else state["body"], self.headers.get("Range", "bytes=-")
            first, _, last = part.removeprefix("bytes=").partition("-")
            if part != "bytes=-" and not fails:
                body = body[int(first) : int(last) + 1]
            self.send_response(state["status"] if fails else 206 if part != "bytes=-" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Accept-Ranges", "bytes")
            if part != "bytes=-":
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(state['body'])}")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state["url"] = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(stores, "_WAITS_S", (0.01,) * 5)
    yield state
    server.shutdown()
    server.server_close()


def test_a_store_that_fails_for_a_while_is_asked_again(
    model: str, web: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", model, "--input_file", web["url"], "--output_file", f"{tmp_path}/out/"]
    assert main(command) == 0
    assert "Asking again" in capsys.readouterr().err
    assert texts_in(tmp_path / "out") == ["one", "two"]


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6])
def test_a_store_that_fails_while_a_shard_is_read_is_asked_again(
    model: str, web: dict[str, Any], tmp_path: Path, after: int
) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"tweet": [f"row {number}" for number in range(30)]}), file, row_group_size=10)
    url = web["url"].replace(".jsonl", ".parquet")
    web.update(body=file.getvalue(), after=after, times=2)
    assert main(["predict", model, "--input_file", url, "--output_file", f"{tmp_path}/out/"]) == 0
    assert texts_in(tmp_path / "out") == [f"row {number}" for number in range(30)]


@pytest.mark.parametrize(("status", "most_asked"), [(403, 2), (503, 20)])
def test_a_store_that_refuses_ends_the_command(
    model: str,
    web: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    most_asked: int,
) -> None:
    web.update(status=status, times=1000)
    assert main(["predict", model, "--input_file", web["url"], "--output_file", f"{tmp_path}/out/"]) == 2
    assert "[store-refused]" in capsys.readouterr().err
    assert web["asked"] <= most_asked
    assert texts_in(tmp_path / "out") == []
