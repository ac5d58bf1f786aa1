"""Which checkpoint a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from indictune.checkpoint import store
from indictune.checkpoint.resume import (
    AllRanksReader,
    DamageReader,
    ResumePoint,
    best_of,
    can_load_best,
    choose_resume_point,
)
from indictune.preflight import checks
from tests.checkpoint import test_store
from tests.checkpoint.test_store import flip_a_bit, truncate, write
from tests.plans import plan_of
from tests.refusals import refused

FLAG = "--resume_from_checkpoint"


def all_ranks(output_dir: Path) -> AllRanksReader:
    args = TrainingArguments(output_dir=str(output_dir), use_cpu=True)
    return AllRanksReader(args, False, None)


@pytest.fixture(params=[DamageReader, lambda: DamageReader(thorough=False), None], ids=["alone", "glance", "ranks"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> DamageReader:
    found: DamageReader = all_ranks(tmp_path) if request.param is None else request.param()
    return found


class TestAuto:
    def test_takes_the_newest_by_its_number(self, tmp_path: Path, reader: DamageReader) -> None:
        for step in (9, 100, 20):
            write(tmp_path, step)
        assert choose_resume_point(tmp_path, "auto", reader) == ResumePoint(tmp_path / "checkpoint-100", None, [], [])

    def test_passes_over_damaged_ones_and_names_them(self, tmp_path: Path, reader: DamageReader) -> None:
        whole, *damaged = (write(tmp_path, step) for step in (4, 8, 12))
        for each in damaged:
            truncate(each / "optimizer.pt")
        point = choose_resume_point(tmp_path, "auto", reader)
        assert (point.checkpoint, point.damaged) == (whole, damaged[::-1])
        assert [str(each / "optimizer.pt") in text for each, text in zip(damaged[::-1], point.warnings, strict=True)]

    def test_starts_afresh_if_none_is_whole(self, tmp_path: Path, reader: DamageReader) -> None:
        assert choose_resume_point(tmp_path / "absent", "auto", reader).checkpoint is None
        (tmp_path / "checkpoint-best").mkdir()
        (tmp_path / "checkpoint-4").mkdir()
        point = choose_resume_point(tmp_path, "auto", reader)
        assert (point.checkpoint, point.damaged) == (None, [tmp_path / "checkpoint-4"])


def test_without_the_flag_a_run_starts_afresh(tmp_path: Path) -> None:
    write(tmp_path, 4)
    assert checks._at_a_glance(plan_of(output_dir=str(tmp_path))) == ResumePoint()


class TestANamedCheckpoint:
    def test_of_the_run_must_be_the_newest_whole_one(self, tmp_path: Path, reader: DamageReader) -> None:
        older, newest, damaged = (write(tmp_path, step) for step in (4, 8, 12))
        truncate(damaged / "optimizer.pt")
        point = choose_resume_point(tmp_path, str(newest), reader)
        assert (point.checkpoint, point.damaged) == (newest, [damaged])
        with refused("resume-not-newest", str(older), flag=FLAG):
            choose_resume_point(tmp_path, str(older), reader)

    @pytest.mark.parametrize("name", ["checkpoint-4", "checkpoint-9", "x" * 300, "."])
    def test_that_is_damaged_or_missing_is_refused(self, tmp_path: Path, reader: DamageReader, name: str) -> None:
        truncate(write(tmp_path, 4) / "optimizer.pt")
        if name == ".":  # the folder of the run, which stands elsewhere
            tmp_path = tmp_path / "other"
        with refused("resume-damaged", flag=FLAG):
            choose_resume_point(tmp_path, str(tmp_path / name), reader)

    def test_of_another_folder_is_resumed_where_it_is(self, tmp_path: Path) -> None:
        state: dict[str, object] = {"best_model_checkpoint": "elsewhere/checkpoint-2"}
        best, named = write(tmp_path / "elsewhere", 2), write(tmp_path / "elsewhere", 4, state=state)
        out = tmp_path / "out"
        assert choose_resume_point(out, str(named), DamageReader()) == ResumePoint(named, best, [], [])
        write(out, 6)
        with refused("resume-not-newest", str(out), flag=FLAG):
            choose_resume_point(out, str(named), DamageReader())


class TestTheBest:
    @pytest.fixture
    def steps(self, tmp_path: Path) -> list[Path]:
        """The last one names the second as the best."""
        state: dict[str, object] = {"best_global_step": 6, "best_model_checkpoint": "elsewhere/checkpoint-4"}
        return [write(tmp_path, 2), write(tmp_path, 4), write(tmp_path, 8, state=state)]

    def test_comes_with_the_checkpoint(self, tmp_path: Path, steps: list[Path], reader: DamageReader) -> None:
        assert choose_resume_point(tmp_path, "auto", reader) == ResumePoint(steps[2], steps[1], [], [])

    def test_is_forgotten_with_a_warning_if_it_is_damaged(
        self, tmp_path: Path, steps: list[Path], reader: DamageReader
    ) -> None:
        truncate(steps[1] / "model.safetensors")
        point = choose_resume_point(tmp_path, "auto", reader)
        assert (point.checkpoint, point.best, point.damaged) == (steps[2], None, [])
        (warning,) = point.warnings
        assert "checkpoint-4, is forgotten: " in warning

    def test_stays_in_the_folder_that_the_run_came_from(self, tmp_path: Path) -> None:
        best = write(tmp_path / "elsewhere", 4)
        checkpoint = write(tmp_path / "out", 8, state={"best_model_checkpoint": str(best)})
        assert best_of(checkpoint) == best
        sibling = write(tmp_path / "out", 4)
        assert best_of(checkpoint) == sibling


def test_a_glance_reads_small_files_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in recipe.yaml would look like a mistake of the user's."""
    monkeypatch.setattr(store, "_QUICKLY_READ_BYTES", 100)
    older, newer = write(tmp_path, 4), write(tmp_path, 8, recipe="optim: adamw_torch")
    flip_a_bit(newer / "model.safetensors")
    assert choose_resume_point(tmp_path, "auto", DamageReader(thorough=False)).checkpoint == newer
    assert choose_resume_point(tmp_path, "auto", DamageReader()).checkpoint == older
    flip_a_bit(newer / "recipe.yaml")
    assert choose_resume_point(tmp_path, "auto", DamageReader(thorough=False)).checkpoint == older


def test_a_damaged_checkpoint_is_set_aside_and_never_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        store.set_aside(write(tmp_path, 8))
    assert store.checkpoints_in(tmp_path) == []
    assert {path.name for path in tmp_path.glob("damaged*")} == {"damaged-checkpoint-8", "damaged-checkpoint-8.2"}


class TestBestAtTheEnd:
    def test_one_that_others_can_write_is_read_if_that_runs_no_code(self, tmp_path: Path) -> None:
        best = write(tmp_path, 4)
        best.chmod(0o777)
        assert can_load_best(best, all_ranks(tmp_path))

    def test_a_damaged_one_is_not_loaded(self, tmp_path: Path) -> None:
        best = write(tmp_path, 4)
        flip_a_bit(best / "model.safetensors")
        assert not can_load_best(best, all_ranks(tmp_path))

    @pytest.mark.parametrize("old", ["shards/0.distcp", "model.safetensors"])
    def test_pickles_that_others_can_write_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str
    ) -> None:
        pickled = {"shards/0.distcp": "pytorch_model_fsdp_0/.metadata", "model.safetensors": "pytorch_model.bin"}
        files = {pickled[old] if name == old else name: content for name, content in test_store.FILES.items()}
        monkeypatch.setattr(test_store, "FILES", files)
        best = write(tmp_path, 4)
        best.chmod(0o777)
        reader = all_ranks(tmp_path)
        with refused("checkpoint-not-trusted", flag="--load_best_model_at_end from"):
            can_load_best(best, reader)
        reader.trust_checkpoint = True
        assert can_load_best(best, reader)
