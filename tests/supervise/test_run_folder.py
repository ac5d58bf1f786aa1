"""The files that a run leaves with its model."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from indictune.files import RECIPE, Record, is_finished, json_line, write_json, write_whole, write_yaml
from indictune.supervise.run_folder import check_folder, check_free, write_status
from indictune.training import finish
from tests.refusals import refused


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A block in which the system takes no file that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class TestWriting:
    def test_a_file_is_written_with_its_folder(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "new" / "a.txt", "अच्छा\n")
        assert (tmp_path / "new" / "a.txt").read_text(encoding="utf-8") == "अच्छा\n"

    def test_json_has_no_number_that_it_cannot_have(self, tmp_path: Path) -> None:
        content = {"a": math.nan, "b": {"c": [1.5, math.inf, (2, -math.inf)]}, "d": None}
        as_read = {"a": "nan", "b": {"c": [1.5, "inf", [2, "-inf"]]}, "d": None}
        write_json(tmp_path / "a.json", content)
        for written in ((tmp_path / "a.json").read_text(), json_line(content)):
            assert json.loads(written, parse_constant=pytest.fail) == as_read

    def test_a_file_takes_the_place_of_the_old_one_and_nothing_is_left_beside_it(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "a.txt", "a longer text")
        write_whole(tmp_path / "a.txt", "new")
        assert (tmp_path / "a.txt").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

    def test_a_reader_of_the_old_file_keeps_the_old_file(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "a.txt", "old and long")
        with (tmp_path / "a.txt").open() as reading:
            write_whole(tmp_path / "a.txt", "new")
            assert reading.read() == "old and long"

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever stops it, no extra file stays next to it."""
        write_whole(tmp_path / "a.txt", "old")
        with largest_file(10), pytest.raises(OSError, match=r"File too large. It needs 100,000 bytes"):
            write_whole(tmp_path / "a.txt", "x" * 100_000)
        (tmp_path / "b").mkdir()
        with pytest.raises(IsADirectoryError, match="Is a directory: '"):  # whatever room there is
            write_whole(tmp_path / "b", "new")
        (tmp_path / "b").rmdir()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write_whole(tmp_path / "a.txt", "new")
        assert (tmp_path / "a.txt").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

    def test_several_that_write_it_at_once_leave_one_whole(self, tmp_path: Path) -> None:
        texts = [str(number) * 100_000 for number in range(4)]
        with ThreadPoolExecutor(4) as writers:
            list(writers.map(partial(write_whole, tmp_path / "a.txt"), texts * 20))
        assert (tmp_path / "a.txt").read_text() in texts
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

    def test_names_that_are_no_utf_8_come_back_as_they_were(self, tmp_path: Path) -> None:
        name = os.fsdecode(b"caf\xe9.csv")
        write_json(tmp_path / "m.json", {name: "\ud83dx"})
        assert json.loads((tmp_path / "m.json").read_text(encoding="utf-8")) == {name: "\ud83dx"}
        write_yaml(tmp_path / RECIPE, {"train_file": name})
        assert yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8")) == {"train_file": name}
        record = Record(tmp_path / "log.jsonl")
        record.append({"file": name})
        assert json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8")) == {"file": name}

    def test_json_keeps_indian_scripts_readable(self, tmp_path: Path) -> None:
        write_json(tmp_path / "m.json", {"अच्छा": 1})
        assert (tmp_path / "m.json").read_text(encoding="utf-8") == '{\n  "अच्छा": 1\n}\n'

    def test_status_holds_state_and_message(self, tmp_path: Path) -> None:
        write_status(tmp_path / "out", "user_error", "--seed x")
        assert json.loads((tmp_path / "out" / "status.json").read_text()) == {
            "state": "user_error", "message": "--seed x",
        }  # fmt: skip

    def test_the_recipe_is_yaml_in_alphabetical_order(self, tmp_path: Path) -> None:
        write_yaml(tmp_path / RECIPE, {"b": None, "a": "हिन्दी"})
        text = (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
        assert text == "a: हिन्दी\nb: null\n"
        assert yaml.safe_load(text) == {"a": "हिन्दी", "b": None}


class TestCheckFree:
    def test_a_folder_that_is_not_there_or_empty_is_free(self, tmp_path: Path) -> None:
        check_free(tmp_path / "new", None)
        check_free(tmp_path, None)

    def test_what_a_mistyped_command_leaves_is_no_run(self, tmp_path: Path) -> None:
        for name in ("status.json", "recipe.yaml", "logs/rank-0.log"):
            touch(tmp_path / name)
        check_free(tmp_path, None)

    @pytest.mark.parametrize(
        "trace",
        [
            "metrics.json",
            "train_log.jsonl",
            "checkpoint-4/optimizer.pt",
        ],
    )
    def test_another_run_is_refused_with_two_ways_out(self, tmp_path: Path, trace: str) -> None:
        touch(tmp_path / trace)
        with refused("output-dir-holds-files", trace.partition("/")[0], "or resume the run", flag="--output_dir"):
            check_free(tmp_path, None)

    def test_weights_and_logs_are_a_run(self, tmp_path: Path) -> None:
        """A second node's disk has no train_log.jsonl."""
        for name in ("config.json", "model.safetensors", "logs/rank-1.log"):
            touch(tmp_path / name)
        check_free(tmp_path, "auto")
        with refused("output-dir-holds-files", "model.safetensors", "or resume the run"):
            check_free(tmp_path, None)

    @pytest.mark.parametrize("resume", ["auto", "out/checkpoint-4"])
    def test_a_run_that_is_resumed_is_this_one(self, tmp_path: Path, resume: str) -> None:
        touch(tmp_path / "checkpoint-4" / "trainer_state.json")
        check_free(tmp_path, resume)

    def test_files_of_an_earlier_command_of_the_kind_may_be_replaced(self, tmp_path: Path) -> None:
        touch(tmp_path / "metrics.json")
        check_free(tmp_path, None, ("metrics.json",))
        touch(tmp_path / "train_log.jsonl")
        with refused("output-dir-holds-files", "train_log.jsonl. Use another folder."):
            check_free(tmp_path, None, ("metrics.json",))


class TestCheckFolder:
    def test_one_that_is_not_there_or_holds_a_run_is_taken(self, tmp_path: Path) -> None:
        check_folder(tmp_path / "new")
        touch(tmp_path / "logs" / "rank-0.log")
        (tmp_path / "newest").symlink_to("checkpoint-8")  # a user's own, which no run writes to
        check_folder(tmp_path)

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        path = touch(tmp_path / "out")
        with refused("folder-expected", str(path), flag="--output_dir"):
            check_folder(path)

    @pytest.mark.parametrize(
        "name",
        [
            *("logs", "logs/rank-0.log", "logs/.ranks", "train_log.jsonl", ".unfinished-checkpoint"),
            *(".unfinished-model", "README.md"),
        ],
    )
    @pytest.mark.parametrize("target", ["", "nothing"])
    def test_a_link_where_a_run_writes_is_refused(self, tmp_path: Path, name: str, target: str) -> None:
        out, link = tmp_path / "out", tmp_path / "out" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / target)
        with refused("output-dir-has-link", f"{out}: {name} is a link", flag="--output_dir"):
            check_folder(out)
        (tmp_path / "linked").symlink_to(tmp_path / "new")  # the folder itself may be one
        check_folder(tmp_path / "linked")


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    "names", [("README.md", "config.json"), ("config.json", "model.safetensors"), ("adapter_model.safetensors",)]
)
def test_files_of_ones_own_are_not_written_over(tmp_path: Path, asked: str | None, names: tuple[str, ...]) -> None:
    for name in ("notes.txt", "recipe.yaml"):  # which a merged model has too
        (tmp_path / name).touch()
    check_free(tmp_path, asked)
    for name in names:
        (tmp_path / name).touch()
    with refused("output-dir-holds-files", f"{', '.join(names)}. Use another folder."):
        check_free(tmp_path, asked)
    (tmp_path / "train_log.jsonl").touch()  # now they are a run's
    check_free(tmp_path, "auto")


def test_files_of_ones_own_that_a_command_does_not_write_are_no_hindrance(tmp_path: Path) -> None:
    for name in ("README.md", "config.json"):
        (tmp_path / name).touch()
    check_free(tmp_path, None, ["metrics.json"])


def test_a_run_is_finished_when_its_metrics_are_there(tmp_path: Path) -> None:
    touch(tmp_path / "model.safetensors")
    assert not is_finished(tmp_path)
    (tmp_path / "metrics.json").touch()  # a power cut may leave it so
    assert not is_finished(tmp_path)
    touch(tmp_path / "metrics.json")
    assert is_finished(tmp_path)


def test_the_mark_of_a_finished_run_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[Path, bool]] = []
    mark = tmp_path / "metrics.json"
    monkeypatch.setattr(finish, "write_through", lambda path: reached.append((path, mark.stat().st_size > 0)))
    trainer = SimpleNamespace(args=SimpleNamespace(should_save=True))
    finish.write_metrics(cast(Any, trainer), cast(Any, SimpleNamespace(output_dir=tmp_path, rank=1)), {"train": {}})
    assert reached == [(mark, True), (tmp_path, True)]


def test_a_manifest_of_another_program_makes_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    check_folder(tmp_path / "out")
    (tmp_path / "trainer_state.json").write_text("{}")
    with refused("folder-in-checkpoint", str(tmp_path), flag="--output_dir"):
        check_folder(tmp_path / "out")
