"""Rows by URL: from a web server and from a real S3 server (moto), into the cache, whole or not at all."""

from __future__ import annotations

import gzip
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from indictune.config.arguments import DataArguments
from indictune.config.recipe import read_recipe
from indictune.data.load_rows import load_splits
from indictune.data.read import open_files
from indictune.data.read.open_files import files_named
from indictune.errors import UserError
from indictune.files import cache_folder
from tests.problems import problems_raised
from tests.ranks.launching import python, start

ROWS = b"text,label\nek,x\ndo,y\n"
MORE = b"text,label\nek,x\ndo,y\nteen,x\n"


@dataclass
class Web:
    """A web server: its files by path, and the requests that it got.

    Attributes:
        cuts: end the connection in the middle of a file.
        changes: give each file another content after it was given once.
        names_versions: give ETags.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""
    cuts: bool = False
    changes: bool = False
    names_versions: bool = True


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    kept = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            kept.asked.append(f"{self.command} {path}")
            content = kept.files.get(path)
            self.send_response(404 if content is None else 200)
            body = content or b""
            if kept.names_versions:
                self.send_header("ETag", f'"{hash(body)}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if kept.cuts else body)
                self.close_connection |= kept.cuts
                if kept.changes:
                    kept.files[path] = body + b"more,x\n"

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield kept
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def a_new_process() -> Iterator[None]:
    yield from asking_again()


def asking_again() -> Iterator[None]:
    """A process asks once for each URL; a test asks as several processes would."""
    open_files._fetched.cache_clear()
    yield
    open_files._fetched.cache_clear()


def labels(named: Any, **more: Any) -> list[str]:
    open_files._fetched.cache_clear()
    rows = load_splits(DataArguments(train_file=named, validation_split=0, **more)).rows["train"]
    return list(rows.table["label"].to_pylist())


def copies() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "prepared").glob("download-*/*.csv*"))


def unfinished() -> list[str]:
    return [path.name for path in (cache_folder() / "prepared").glob(".download-*") if path.is_dir()]


def test_a_file_is_fetched_again_only_if_it_changed(web: Web) -> None:
    web.files["/a.csv"] = ROWS
    for _ in range(2):
        assert labels(f"{web.url}/a.csv") == ["x", "y"]
    assert web.asked.count("GET /a.csv") == 1
    web.files["/a.csv"] = MORE
    assert labels(f"{web.url}/a.csv") == ["x", "y", "x"]
    assert web.asked.count("GET /a.csv") == 2
    web.files["/a.csv"] = ROWS
    assert labels(f"{web.url}/a.csv") == ["x", "y"]
    assert web.asked.count("GET /a.csv") == 2


def test_a_process_asks_once_so_that_its_rows_are_of_one_state(web: Web) -> None:
    web.files["/a.csv"] = ROWS
    before = files_named(f"{web.url}/a.csv", "train")
    web.files["/a.csv"] = MORE
    assert files_named(f"{web.url}/a.csv", "train") == before


def test_processes_of_a_node_fetch_a_file_once(web: Web) -> None:
    web.files["/a.csv"] = ROWS * 20_000
    with ThreadPoolExecutor(4) as several:
        found = list(several.map(lambda _: files_named(f"{web.url}/a.csv", "train"), range(4)))
    assert len({str(each) for each in found}) == 1
    assert web.asked.count("GET /a.csv") == 1


def test_packed_files_queries_and_several_urls(web: Web) -> None:
    web.files |= {"/a.csv.gz": gzip.compress(ROWS), "/b.csv": MORE}
    assert labels([f"{web.url}/a.csv.gz?raw=true", f"{web.url}/b.csv"]) == ["x", "y", "x", "y", "x"]


def test_a_broken_download_leaves_nothing(web: Web) -> None:
    web.files["/a.csv"], web.cuts = ROWS, True
    assert problems_raised(lambda: labels(f"{web.url}/a.csv")) == [f"--train_file {web.url}/a.csv url-unreadable"]
    assert not copies() + unfinished()
    web.cuts = False
    assert labels(f"{web.url}/a.csv") == ["x", "y"]


def test_a_file_that_changes_meanwhile_is_refused(web: Web) -> None:
    web.files["/a.csv"], web.changes = ROWS, True
    assert problems_raised(lambda: labels(f"{web.url}/a.csv")) == [f"--train_file {web.url}/a.csv url-changed"]
    assert not copies() + unfinished()


def test_what_cannot_be_fetched_is_refused_by_name(web: Web) -> None:
    web.files["/a.csv"] = ROWS
    assert problems_raised(lambda: labels(f"{web.url}/b.csv")) == [f"--train_file {web.url}/b.csv no-such-file"]
    web.names_versions = False
    assert problems_raised(lambda: labels(f"{web.url}/a.csv")) == [f"--train_file {web.url}/a.csv url-without-version"]
    found = problems_raised(lambda: labels("http://127.0.0.1:9/a.csv"))
    assert found == ["--train_file http://127.0.0.1:9/a.csv url-unreadable"]


@pytest.mark.parametrize("part", ["https://me:secret@host/a.csv", "s3://b/a.csv?X-Amz-Signature=0123abc"])
def test_a_url_with_a_login_or_a_signature_is_refused_and_not_repeated(part: str) -> None:
    recipe = read_recipe(["--train_file", part], (DataArguments,))
    (found,) = recipe.problems
    assert (found.code, found.flag) == ("token-in-the-open", "--train_file")
    assert "train_file" not in recipe.values
    assert "secret" not in str(found)
    assert "0123abc" not in str(found)


class TestAPatternWithLanguages:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("hi", "ta", "README"):
            Path(f"{name}.csv").write_bytes(ROWS if name == "hi" else MORE)
        Path("ur").mkdir()
        Path("ur/test.csv").write_text("text,label,language\nek,x,\ndo,y,mr\n")

    def test_it_names_the_language_of_the_rows(self) -> None:
        rows = load_splits(DataArguments(train_file="hi.csv", test_file="{language}.csv")).rows["test"]
        assert rows.table["language"].to_pylist() == ["hi"] * 2 + ["ta"] * 3
        assert [rows.location(n) for n in (0, 4)] == ["hi.csv:2", "ta.csv:4"]
        rows = load_splits(DataArguments(train_file="hi.csv", test_file="{language}/*.csv")).rows["test"]
        assert rows.table["language"].to_pylist() == ["ur", "mr"]

    def test_rows_in_the_cache_depend_on_it(self) -> None:
        for pattern, languages in (("[h-t]?.csv", {"en", "und-Latn", "mr"}), ("{language}.csv", {"hi", "ta", "mr"})):
            args = DataArguments(train_file=["ur/test.csv", pattern], validation_split=0)
            assert languages <= set(load_splits(args).rows["train"].table["language"].to_pylist())

    def test_entries_of_train_files_take_it_too(self) -> None:
        entry = '{"path": "{language}.csv", "weight": 2, "language": "kn"}'
        rows = load_splits(DataArguments(train_files=[entry, "ur/test.csv"], validation_split=0)).rows["train"]
        assert rows.table["language"].to_pylist() == ["hi"] * 2 + ["ta"] * 3 + ["und-Latn", "mr"]

    def test_other_signs_mean_what_they_did(self) -> None:
        assert list(files_named("[h-t]?.csv", "train")[1].items()) == [("hi.csv", None), ("ta.csv", None)]
        assert list(files_named("**/*.csv", "train")[1]) == ["README.csv", "hi.csv", "ta.csv", "ur/test.csv"]
        assert files_named("**/{language}.csv", "train")[1] == {"hi.csv": "hi", "ta.csv": "ta"}

    def test_it_needs_a_code_in_the_name(self) -> None:
        found = problems_raised(lambda: load_splits(DataArguments(train_file="READ{language}.csv")))
        assert found == ["--train_file READ{language}.csv no-files-match"]


def test_a_folder_of_one_kind_and_split_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "tweets"
    folder.mkdir()
    for name in ("a.csv", "b.csv", ".hidden.csv", "notes.md"):
        (folder / name).write_bytes(ROWS)
    assert [Path(file).name for file in files_named(str(folder), "train")[1]] == ["a.csv", "b.csv"]
    for name in ("c.jsonl", "a-test.csv"):
        (folder / name).write_bytes(ROWS)
        with pytest.raises(UserError, match="folder-not-saved"):
            files_named(str(folder), "train")
        (folder / name).unlink()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import boto3
    import s3fs

    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    s3fs.S3FileSystem.clear_instance_cache()
    made = boto3.resource("s3").create_bucket(Bucket=tmp_path.name.replace("_", "-").lower())
    yield made
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.more
def test_s3_files_patterns_and_folders(bucket: Any) -> None:
    for name in ("tweets/hi.csv", "tweets/ta.csv", "tweets/old/kn.csv", "other.csv"):
        bucket.put_object(Key=name, Body=ROWS if name == "tweets/hi.csv" else MORE)
    url = f"s3://{bucket.name}"
    assert labels(f"{url}/other.csv") == ["x", "y", "x"]
    assert len(labels(f"{url}/tweets/*.csv")) == len(labels(f"{url}/tweets/")) == 5
    open_files._fetched.cache_clear()
    rows = load_splits(DataArguments(train_file=f"{url}/other.csv", test_file=f"{url}/**/{{language}}.csv")).rows
    assert rows["test"].table["language"].to_pylist() == ["hi"] * 2 + ["kn"] * 3 + ["ta"] * 3
    bucket.put_object(Key="other.csv", Body=ROWS)
    assert labels(f"{url}/other.csv") == ["x", "y"]
    found = problems_raised(lambda: labels([f"{url}/nothing.csv"]))
    assert found == [f"--train_file {url}/nothing.csv no-such-file"]
    assert problems_raised(lambda: labels(f"{url}/x/*.csv")) == [f"--train_file {url}/x/*.csv no-files-match"]


@pytest.mark.more
def test_a_missing_package_is_named() -> None:
    code = "import sys; sys.modules['s3fs'] = None; from indictune.data.read.open_files import files_named as f; f("
    done = subprocess.run([*python(), "-c", f"{code}'s3://b/a.csv', 'train')"], capture_output=True, text=True)
    assert "pip install 'indictune[remote]'" in done.stderr
    assert "[url-needs-package]" in done.stderr


@contextmanager
def overwriting(bucket: Any, key: str) -> Iterator[None]:
    """Somebody writes the object again and again."""
    stop = threading.Event()

    def write() -> None:
        for number in range(10_000):
            bucket.put_object(Key=key, Body=MORE + f"row {number},x\n".encode())
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


@pytest.mark.more
def test_an_s3_object_that_changes_meanwhile_is_refused(bucket: Any) -> None:
    bucket.put_object(Key="a.csv", Body=MORE)
    with overwriting(bucket, "a.csv"):
        found = problems_raised(lambda: labels(f"s3://{bucket.name}/a.csv"))
    assert [each.rpartition(" ")[2] for each in found] == ["url-changed"]
    assert f"{bucket.name}/a.csv" in found[0]
    assert not copies() + unfinished()
    assert labels(f"s3://{bucket.name}/a.csv")[:3] == ["x", "y", "x"]


@pytest.mark.more
def test_a_resumed_run_refuses_an_object_that_changed(bucket: Any, tmp_path: Path) -> None:
    rows = "".join(f"subah {n},{'xy'[n % 2]}\n" for n in range(24))
    bucket.put_object(Key="a.csv", Body=f"text,label\n{rows}".encode())
    command = [*python(), "scripts/train_sentiment.py", "--train_file", f"s3://{bucket.name}/a.csv"]
    command += ["--output_dir", str(tmp_path / "out"), "--save_strategy", "steps", "--save_steps", "1"]
    command += ["--eval_strategy", "no", "--global_batch_size", "8", "--max_steps"]
    environment = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    assert start([*command, "1", "--load_best_model_at_end", "false"], environment).returncode == 0
    bucket.put_object(Key="a.csv", Body=f"text,label\n{rows}subah 2,x\n".encode())
    more = ("--load_best_model_at_end", "false", "--resume_from_checkpoint", "auto")
    for code in ("finished-with-other-rows", "resume-other-rows"):
        again = start([*command, "2", *more], environment)
        assert again.returncode == 2
        assert f"[{code}]" in again.stderr
        assert f"rows in s3://{bucket.name}/a.csv." in again.stderr
        (tmp_path / "out/metrics.json").unlink(missing_ok=True)  # as in a run that was ended
