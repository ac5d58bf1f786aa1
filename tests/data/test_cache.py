"""What is made once: by one process, whole or not at all, and anew when anything that it depends on changes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune import files as files_module
from indictune.config.arguments import DataArguments
from indictune.data import cache
from indictune.data.bad_rows import Batches
from indictune.data.cache import (
    StoredRows,
    build_once,
    with_progress,
    write_on,
    write_table,
)
from indictune.data.load_rows import load_splits
from indictune.data.read import read_files
from indictune.data.row_choice import Splits
from indictune.data.text import cleaning
from indictune.errors import UserError, problem
from indictune.files import content_digest, known_digest
from indictune.run import OWN_PROGRESS
from indictune.stop_signals import Stopped
from tests.refusals import refused

# Adds a line to ./made when it begins, and takes a second.
SLOW = """
import sys, time
from pathlib import Path
from typing import Any
from indictune.data.cache import build_once

def make(folder):
    with open("made", "a") as file:
        file.write("once\\n")
    (folder / "half").write_text("half")
    time.sleep(float(sys.argv[1]))
    (folder / "whole").write_text("whole")

if len(sys.argv) > 2:  # a file system without locks
    import errno, fcntl, os
    flock = fcntl.flock
    def refuse(file, flags):
        if os.readlink(f"/proc/self/fd/{file}").startswith(sys.argv[2]):
            raise OSError(errno.ENOSYS, "no locks")
        flock(file, flags)
    fcntl.flock = refuse

print((build_once("things", ["key"], "The things", make) / "whole").read_text())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "prepared"


def writes(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "text").write_text(text)

    return make


def start_slow(seconds: float, *more: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(seconds), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_second_call_makes_nothing(folder: Path) -> None:
    first = build_once("things", [1, "a"], "The things", writes("made"))
    assert build_once("things", [1, "a"], "The things", lambda _: pytest.fail("made twice")) == first
    assert (first / "text").read_text() == "made"
    assert visible(folder) == [first.name]


def batches(number: int) -> list[pa.RecordBatch]:
    texts = [pa.array([f"{batch}", None, "अच्छा" * 40]) for batch in range(number)]
    return [pa.record_batch([each, pa.array([1, None, batch])], ["text", "line"]) for batch, each in enumerate(texts)]


def test_a_table_goes_on_where_a_killed_process_stopped(tmp_path: Path) -> None:
    path, given, asked = tmp_path / "t.arrow", batches(5), list[int]()

    def batches_from(done: int) -> Batches:
        asked.append(done)
        return iter(given[done:])

    write_table(path, given[0].schema, iter(given))
    whole = path.read_bytes()
    path.unlink()
    for end in range(0, len(whole), 97):
        for rest in (b"", bytes(len(whole) - end)):  # the disk may have lost what came last
            path.unlink(missing_ok=True)
            Path(f"{path}.unfinished").write_bytes(whole[:end] + rest)
            write_on(path, given[0].schema, batches_from, "reading")
            assert path.read_bytes() == whole
            assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert sorted(set(asked)) == [0, 1, 2, 3, 4, 5]


def test_work_that_was_stopped_goes_on_and_work_that_failed_does_not(folder: Path) -> None:
    def make(error: BaseException | None, lines: list[str]) -> Callable[[Path], None]:
        def add(unfinished: Path) -> None:
            lines.extend(path.name for path in unfinished.iterdir())
            (unfinished / "train.read").write_text("rows")
            (unfinished / "rejected.jsonl").write_text("written again")
            if error:
                raise error

        return add

    found: list[str] = []
    for error in (KeyboardInterrupt(), Stopped(), UserError("no-rows")):
        with pytest.raises(type(error)):
            build_once("things", [], "The things", make(error, found))
    assert found == ["train.read"] * 2  # by the second and the third
    assert visible(folder) == []
    build_once("things", [], "The things", make(None, found))
    assert found == ["train.read"] * 2


@pytest.mark.parametrize("stops_at", [0, 1, 3, 4])
def test_rows_that_were_cleaned_are_not_cleaned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: int
) -> None:
    """A batch has ten rows, the last one of each without a text, and one file has a bad row."""
    monkeypatch.setattr(read_files.string_batches, "__defaults__", (10,))
    rows = [f"{f'film {row}' if (row + 1) % 10 else ''},{('good', 'bad')[row % 2]}\n" for row in range(50)]
    Path("train.csv").write_text("text,label\n" + "".join(rows) + "bad,row,here\n", encoding="utf-8")
    args = DataArguments(train_file="train.csv", bad_rows="quarantine", max_bad_fraction=0.1, num_proc=1)
    expected = load_splits(args)
    clean, calls = cleaning.clean_batch, list[int]()

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        if len(calls) == stops_at:
            raise KeyboardInterrupt
        calls.append(1)
        return clean(batch)

    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(cleaning, "clean_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        load_splits(args)
    stops_at = 100
    found = load_splits(args)
    assert len(calls) == 5
    assert found.rows["train"].table.equals(expected.rows["train"].table)
    assert found.notes == expected.notes
    assert {path.name: content_digest(path) for path in found.folder.iterdir()} == {
        path.name: content_digest(path) for path in expected.folder.iterdir()
    }


def test_a_large_file_is_read_for_its_digest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("one")
    monkeypatch.setattr(files_module, "_LARGE_BYTES", 2)
    monkeypatch.setattr(files_module, "_SETTLED_S", 0.0)
    digests = [content_digest(path)]
    digests.append(known_digest(str(path)))
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "content_digest", lambda path: pytest.fail(f"read {path}"))
        digests.append(known_digest(str(path)))
    assert len(set(digests)) == 1
    path.write_text("two")
    assert known_digest(str(path)) == content_digest(path) != digests[0]


def test_other_parts_or_another_kind_have_a_folder_of_their_own() -> None:
    folders = {
        build_once(kind, parts, "The things", writes(""))
        for kind, parts in (("a", [1]), ("b", [1]), ("a", [2]), ("a", ["1"]), ("a", [[1]]))
    }
    assert len(folders) == 5


@pytest.mark.more
def test_processes_that_start_together_make_it_once(tmp_path: Path) -> None:
    processes = [start_slow(1.5) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["whole\n"] * 3
    assert (tmp_path / "made").read_text() == "once\n"


@pytest.mark.more
def test_on_a_disk_without_locks_one_process_of_each_node_makes_it(tmp_path: Path, folder: Path) -> None:
    """A node is where processes share a temporary folder."""
    processes = []
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        processes += [start_slow(2, str(folder), TMPDIR=str(tmp_path / node)) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["whole\n"] * 4
    assert (tmp_path / "made").read_text() in ("once\n", "once\n" * 2)  # one, if the other node began late
    assert len(visible(folder)) == 1


@pytest.mark.more
def test_who_makes_it_waits_for_it_or_finds_it_has_passed_the_same_places(folder: Path) -> None:
    counts = [OWN_PROGRESS.count]
    build_once("others", [], "The others", writes(""))
    counts.append(OWN_PROGRESS.count)
    build_once("others", [], "The others", writes(""))
    counts.append(OWN_PROGRESS.count)
    slow = start_slow(3)
    while not list(folder.glob(".*/half")):
        time.sleep(0.02)
    build_once("things", ["key"], "The things", lambda _: pytest.fail("made twice"))
    counts.append(OWN_PROGRESS.count)
    assert [count - counts[0] for count in counts] == [0, 2, 4, 6]
    assert slow.communicate(timeout=60)[0] == "whole\n"


def test_a_process_moves_with_each_batch_that_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[None] = []
    monkeypatch.setattr(OWN_PROGRESS, "moved", lambda: moves.append(None))
    batches = [pa.record_batch({"text": ["a", "b"]})] * 3
    assert list(with_progress(batches, "reading")) == batches
    assert len(moves) == 3


def test_what_a_killed_process_left_is_not_read_and_goes_away(tmp_path: Path, folder: Path) -> None:
    killed = start_slow(60)
    while not list(folder.glob(".*/half")):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.communicate()
    (left,) = (half.parent for half in folder.glob(".*/half"))
    copy = shutil.copytree(left, left.with_name(".others-0-unfinished"))
    assert start_slow(0).communicate(timeout=60)[0] == "whole\n"
    assert (tmp_path / "made").read_text() == "once\nonce\n"
    assert not left.exists()
    assert copy.exists()  # for a day: its maker's lock may be on another machine
    os.utime(copy, (time.time() - 2 * 24 * 3600,) * 2)
    build_once("others", [], "The others", writes(""))
    assert copy.exists()  # its maker wrote to a file since
    for path in (copy / "half", copy):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    build_once("others", [1], "The others", writes(""))
    assert not copy.exists()


@pytest.mark.more
def test_what_another_process_is_making_stays(folder: Path) -> None:
    slow = start_slow(2)
    while not list(folder.glob(".*/half")):
        time.sleep(0.02)
    build_once("others", [], "The others", writes(""))
    assert len(list(folder.glob(".*/half"))) == 1
    assert slow.communicate(timeout=60)[0] == "whole\n"


def without_locks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)


# NFS without lockd says the first; Lustre, mounted without flock, the last.
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_keeps_what_is_made(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(number, monkeypatch)
    made = build_once("things", [], "The things", writes("made"))
    os.utime(left_over(folder, "things-key"), (0, 0))
    assert build_once("things", [], "The things", lambda _: pytest.fail("made twice")) == made
    build_once("others", [], "The others", writes(""))


@pytest.mark.timeout(60)
def test_a_file_system_without_locks_gets_no_marks_in_their_place_which_a_killed_process_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one on another machine is alive, nobody can tell: all would wait for it."""
    without_locks(errno.ENOSYS, monkeypatch)
    made = build_once("things", [], "The things", writes(""))
    shutil.rmtree(made)
    made.with_name(f".{made.name}.lock").write_text("1234\nanother-machine\n")
    assert build_once("things", [], "The things", writes("")) == made


def test_a_file_system_that_refuses_modes_keeps_what_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    made = build_once("things", [], "The things", writes("made"))
    assert (made / "text").read_text() == "made"


def test_of_two_that_make_it_without_locks_the_first_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("filelock.FileLock.acquire", refuse_locks)
    made: set[Path] = set()

    def slow(unfinished: Path) -> None:
        if not made:
            made.add(build_once("things", [], "The things", writes("first")))
        (unfinished / "text").write_text("last")

    made.add(build_once("things", [], "The things", slow))
    assert [(path / "text").read_text() for path in made] == ["first"]
    assert visible(folder) == [path.name for path in made]


def refuse_locks(*_: object, **__: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def left_over(folder: Path, of: str) -> Path:
    """What a killed process leaves, with its lock's file as older versions made it."""
    left = folder / f".{of}-left"
    left.mkdir(mode=0o700)
    (folder / f".{of}.lock").touch(0o644)
    return left


def make_as_nobody(parts: list[str]) -> str:
    os.setuid(65534)
    return (build_once("things", parts, "The things", writes("nobody's")) / "text").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_two_users_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as shared:  # a folder of pytest's own is closed to others
        monkeypatch.setenv("INDICTUNE_CACHE", shared)
        ours = build_once("things", ["a"], "The things", writes("root's"))
        lock = ours.with_name(f".{ours.name}.lock")
        assert stat.S_IMODE(lock.stat().st_mode) == 0o666
        for each in (shared, ours.parent):
            os.chmod(each, 0o777)
        os.utime(left_over(ours.parent, "things-key"), (0, 0))
        shutil.rmtree(ours)  # as if killed while it was made
        lock.chmod(0o644)
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            assert pool.submit(make_as_nobody, ["a"]).result() == "nobody's"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_rows_that_only_another_user_can_read_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as shared:
        monkeypatch.setenv("INDICTUNE_CACHE", shared)
        os.chmod(shared, 0o777)
        ours = build_once("things", ["a"], "The things", writes("root's"))
        (ours / "digests.json").chmod(0o600)
        with (
            ProcessPoolExecutor(1, get_context("fork")) as pool,
            refused("cache-not-written", "The things", "Permission denied"),
        ):
            pool.submit(make_as_nobody, ["a"]).result()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "digests"])
def test_a_damaged_folder_is_made_again(damage: str) -> None:
    made = build_once("things", [], "The things", writes("the whole text"))
    if damage == "cut":
        os.truncate(made / "text", 5)
    elif damage == "changed":  # by the disk: its size is as it was
        (made / "text").write_text("the vhole text")
    else:
        (made / {"gone": "text", "digests": "digests.json"}[damage]).unlink()
    assert build_once("things", [], "The things", writes("the whole text")) == made
    assert (made / "text").read_text() == "the whole text"


def test_a_problem_leaves_nothing_and_is_reported_again(folder: Path) -> None:
    both = [problem("no-such-file", flag, "f") for flag in ("--train_file", "--test_file")]

    def refuse(unfinished: Path) -> None:
        (unfinished / "half").write_text("half")
        raise UserError(problems=both)

    for _ in range(2):
        with pytest.raises(UserError) as raised:
            build_once("things", [], "The things", refuse)
        assert raised.value.problems == both
    assert visible(folder) == []


def test_a_full_disk_is_reported_with_the_way_out(tmp_path: Path) -> None:
    # A file may grow to 1,000 bytes in this process: writing ends as on a full disk, with another errno.
    limited = (
        "import resource\nfrom indictune.data.cache import build_once\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "make = lambda folder: (folder / 'a').write_bytes(bytes(5000))\n"
        "build_once('things', [], 'The things', make)\n"
    )
    result = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    assert f"{tmp_path}/cache/prepared: The things cannot be kept there: File too large." in result.stderr
    assert visible(tmp_path / "cache" / "prepared") == []


def test_a_cache_that_is_no_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "file"))
    with refused("cache-not-written", "The things"):
        build_once("things", [], "The things", writes(""))


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("a")
    digest = content_digest("a")
    os.utime(file, (1, 1))
    assert content_digest("a") == digest
    file.write_text("b")
    os.utime(file, (1, 1))
    assert content_digest("a") != digest
    assert content_digest("b").startswith("unreadable: ")


def test_a_file_that_stays_as_it_is_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time in which a change may leave its time as it was."""
    file = tmp_path / "a"
    file.write_text("a")
    later = os.stat(file).st_ctime + 3
    monkeypatch.setattr("indictune.data.cache.time.time", lambda: later)
    digest = content_digest(file)
    with monkeypatch.context() as patch:
        patch.setattr("indictune.data.cache.hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert content_digest(file) == digest
    file.write_text("bb")
    assert content_digest(file) != digest


def test_other_code_or_another_library_reads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [build_once("things", [], "The things", writes(""))]
    for name, other in (("versions_of", lambda _: {"trl": "0.0"}), ("_code_digest", lambda: "0")):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, other)
            made.append(build_once("things", [], "The things", writes("")))
    assert len(set(made)) == 3


ROWS = "text,label,lang,other\nok,a,hi,ok\nbad,b,te,no\nleak,a,ta,x\n"


def load(**arguments: str | bool | None) -> Splits[StoredRows]:
    given = {"train_file": "train.csv", "validation_file": "held.csv", **arguments}
    return load_splits(DataArguments(**given))  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(ROWS)
    (tmp_path / "held.csv").write_text("text,label,lang,other\nleak,a,ta,y\n")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "change",
    [
        {"text_column": "other"},
        {"language_column": "lang"},
        {"drop_leaked_rows": True},
        {"problem_type": "single_label_classification"},
        {"validation_file": None},
        {"test_file": "held.csv"},
        {"train_file": "bytes.csv"},
        {"train_file": ["train.csv", "bytes.csv"]},
        {"delimiter": ","},
        {"sheet": "a"},
        {"quoting": "none"},
        {"label_map": ["a=c"]},
        {"keep_label_spellings": True},
        {"column_names": ["text", "label", "lang", "other"]},
        {"bad_rows": "quarantine"},
        {"bad_rows": "quarantine", "max_bad_fraction": 0.5},
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else None,
)
def test_rows_are_read_anew_when_anything_changes(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_text(ROWS + "more,a,hi,x\n")
    assert load().folder == load().folder
    assert load(**change).folder != load().folder


@pytest.mark.usefixtures("files")
def test_the_same_name_with_other_bytes_is_read_anew_and_the_same_bytes_with_another_time_are_not(
    tmp_path: Path,
) -> None:
    before = load().folder
    os.utime(tmp_path / "train.csv", (1, 1))
    assert load().folder == before
    (tmp_path / "train.csv").write_text(ROWS.replace("ok,a", "OK,a"))
    os.utime(tmp_path / "train.csv", (1, 1))
    assert load().rows["train"].table["text"][0].as_py() == "OK"


@pytest.mark.usefixtures("files")
def test_a_second_call_gives_the_same_rows_places_and_notes_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    monkeypatch.setattr("indictune.data.read.read_files.SplitFiles.batches", lambda *_: pytest.fail("read again"))
    second = load()
    assert first.notes == second.notes
    assert first.notes[0].startswith("train.csv: 1 of 3 training rows also stand in held.csv")
    assert second.rows["train"].table.equals(first.rows["train"].table)
    assert second.rows["train"].location(2) == "train.csv:4"
    assert (second.rows["train"].origin, second.labels) == ("--train_file", ["a", "b"])
    assert second.rows["train"].table["label"].to_pylist() == ["a", "b", "a"]


def test_a_dataset_of_the_hub_is_known_by_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "tweets").mkdir()

    def folder_of_rows() -> Path:
        return load_splits(DataArguments(dataset_name="./tweets")).folder

    pq.write_table(pa.table({"text": ["one", "two"], "label": ["a", "b"]}), tmp_path / "tweets" / "train.parquet")
    first = folder_of_rows()
    assert folder_of_rows() == first
    pq.write_table(pa.table({"text": ["one", "three"], "label": ["a", "b"]}), tmp_path / "tweets" / "train.parquet")
    assert folder_of_rows() != first


def test_the_fields_of_a_run_that_change_its_rows_are_all_tried() -> None:
    tried = {"text_column", "language_column", "drop_leaked_rows", "validation_file", "test_file", "train_file"}
    tried |= {"bad_rows", "max_bad_fraction", "problem_type", "delimiter", "quoting", "column_names", "sheet"}
    tried |= {"label_map", "keep_label_spellings"}
    elsewhere = {
        *("max_unknown_share", "max_collision_share", "max_near_duplicate_share", "max_conflict_share"),
        "validation_split",
        "label_column",
        "dataset_name",
        *("dataset_config_name", "dataset_revision", "dataset_splits"),  # tests/data/test_dataset_parts.py
        "max_length",
        *("train_files", "language_sampling_alpha", "long_text"),  # tests/first_hour
        "text_pair_column",  # tests/data/test_pairs.py
        "task",  # each has its own rows
        "num_proc",  # which changes none: tests/data/test_clean_batches.py
    }
    assert {field.name for field in dataclasses.fields(DataArguments)} == tried | elsewhere


def test_facts_are_plain_json(files: None) -> None:
    facts = json.loads((load().folder / "facts.json").read_text())
    assert facts["splits"] == {
        "train": ["train.csv", "--train_file", []],
        "validation": ["held.csv", "--validation_file", []],
    }
