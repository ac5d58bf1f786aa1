"""Which checkpoint a run goes on from, and what it refuses to read."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from indictune.checkpoint import compatibility, flag_files, resume, store
from indictune.config.plan import Launch
from indictune.errors import UserError
from tests.checkpoint import test_store
from tests.checkpoint.test_store import flip_a_bit, truncate, write

OF_THIS_RUN: dict[str, Any] = {
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "max_tokens_per_device": None,
    "optim": "adamw_torch",
    "async_save": False,
    "on_nonfinite": "stop",
}


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def step(output_dir: Path, asked: str | None) -> int | None:
    found = resume.candidate(output_dir, asked)
    return None if found is None else store.step_of(found)


class TestCandidate:
    def test_without_the_flag_a_run_starts_afresh(self, tmp_path: Path) -> None:
        write(tmp_path, 4)
        assert step(tmp_path, None) is None

    def test_auto_takes_the_newest_by_its_number(self, tmp_path: Path) -> None:
        for each in (9, 100, 20):
            write(tmp_path, each)
        assert step(tmp_path, "auto") == 100

    def test_auto_passes_over_a_damaged_one(self, tmp_path: Path) -> None:
        write(tmp_path, 4)
        truncate(write(tmp_path, 8) / "model.safetensors")
        assert step(tmp_path, "auto") == 4

    @pytest.mark.parametrize("name", compatibility.READ)
    def test_one_is_taken_for_damaged_by_what_is_read_of_it_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """A flipped bit there would be told as a mistake of the user's."""
        monkeypatch.setattr(test_store, "FILES", {**test_store.FILES, name: b"optim: adamw_torch"})
        older, newer = write(tmp_path, 4), write(tmp_path, 8)
        flip_a_bit(newer / "model.safetensors")  # is large, and not read here
        assert step(tmp_path, "auto") == 8
        flip_a_bit(newer / name)
        assert step(tmp_path, "auto") == 4
        assert step(tmp_path, str(older)) == 4
        with pytest.raises(UserError) as raised:
            step(tmp_path, str(newer))
        assert raised.value.problems == [
            f"--resume_from_checkpoint {newer}: is damaged: {newer / name} is not as it was written. Name another, or "
            "type auto for the newest whole one."
        ]

    def test_auto_starts_afresh_where_there_is_none(self, tmp_path: Path) -> None:
        assert step(tmp_path / "not there", "auto") is None
        (tmp_path / "checkpoint-best").mkdir()
        assert step(tmp_path, "auto") is None

    def test_a_named_one_is_taken_wherever_it_is(self, tmp_path: Path) -> None:
        named = write(tmp_path / "elsewhere", 4)
        assert resume.candidate(tmp_path / "out", str(named)) == named

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("", "is no checkpoint (it has no manifest.json), but holds checkpoint-8"),
            ("checkpoint-8", "is no checkpoint (it has no manifest.json)"),
            ("checkpoint-9", "there is no such folder"),
            ("x" * 300, "cannot be entered (File name too long)"),
        ],
    )
    def test_a_named_folder_that_is_no_checkpoint_is_refused(self, tmp_path: Path, name: str, told: str) -> None:
        (tmp_path / "checkpoint-8").mkdir()
        (tmp_path / "checkpoint-8" / "trainer_state.json").touch()
        with pytest.raises(UserError) as raised:
            step(tmp_path, str(tmp_path / name))
        assert raised.value.problems == [
            f"--resume_from_checkpoint {tmp_path / name}: {told}. Name a checkpoint-<step> folder, or type auto for "
            "the newest in --output_dir."
        ]

    def test_a_named_one_of_the_run_may_be_whole_on_the_disk_of_another_node(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        out, left = tmp_path / "out", tmp_path / "out" / "abandoned-1"
        for named in (out / "checkpoint-4", left / "checkpoint-4"):
            assert step(out, str(named)) is None
        truncate(write(out, 4) / "optimizer.pt")
        assert step(out, str(out / "checkpoint-4")) is None
        with pytest.raises(UserError, match="there is no such folder"):
            step(out, str(tmp_path / "elsewhere" / "checkpoint-4"))
        assert step(out, str(write(out, 8))) == 8
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.raises(UserError, match="there is no such folder"):
            step(out, str(left / "checkpoint-4"))

    def test_a_named_one_of_the_run_whose_replacement_was_cut_will_be_given_back(self, tmp_path: Path) -> None:
        named = write(tmp_path, 4)
        named.rename(tmp_path / ".replaced-checkpoint")
        assert step(tmp_path, str(named)) is None
        for other in (tmp_path / "checkpoint-8", tmp_path / "checkpoint-x"):
            with pytest.raises(UserError, match="there is no such folder"):
                step(tmp_path, str(other))
        with pytest.raises(UserError, match="there is no such folder"):
            step(tmp_path / "out", str(named))

    def test_a_named_one_that_is_damaged_is_refused(self, tmp_path: Path) -> None:
        named = write(tmp_path, 4)
        truncate(named / "optimizer.pt")
        with pytest.raises(UserError, match=r"optimizer.pt has 299 bytes instead of 300. Name another, or type auto"):
            step(tmp_path, str(named))


class TestNewestWhole:
    def test_a_file_that_is_damaged_is_named(
        self, tmp_path: Path, args: TrainingArguments, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = [write(tmp_path, 4), write(tmp_path, 8)]
        flip_a_bit(found[1] / "optimizer.pt")
        with caplog.at_level(logging.WARNING):
            assert resume.newest_whole(found, "auto", args, False)[0] == found[0]
        assert caplog.messages == [
            f"checkpoint-8 cannot be gone on from: {found[1] / 'optimizer.pt'} is not as it was written"
        ]

    @pytest.fixture
    def found(self, tmp_path: Path) -> list[Path]:
        """The third names the second as the best, from where the run stood before, and has compared another since."""
        state = {"best_global_step": 6, "best_model_checkpoint": "elsewhere/checkpoint-4"}
        return [write(tmp_path, 2), write(tmp_path, 4), write(tmp_path, 8, state=state)]

    def test_comes_with_the_best_that_was_saved(self, found: list[Path], args: TrainingArguments) -> None:
        assert resume.newest_whole(found, "auto", args, False) == (found[2], found[1])

    def test_comes_without_a_best_that_is_gone_and_not_needed(
        self, found: list[Path], args: TrainingArguments
    ) -> None:
        shutil.rmtree(found[1])
        assert resume.newest_whole([found[0], found[2]], "auto", args, False) == (found[2], None)

    def test_one_whose_best_is_whole_comes_first_where_it_is_needed(
        self, found: list[Path], args: TrainingArguments
    ) -> None:
        flip_a_bit(found[1] / "model.safetensors")
        assert resume.newest_whole(found, "auto", args, False) == (found[2], found[1])
        args.load_best_model_at_end = True
        assert resume.newest_whole(found, "auto", args, False) == (found[0], None)

    @pytest.mark.parametrize("asked", ["auto", "checkpoint-8"])
    def test_the_best_is_forgotten_where_nothing_else_is_whole(
        self, found: list[Path], args: TrainingArguments, caplog: pytest.LogCaptureFixture, asked: str
    ) -> None:
        args.load_best_model_at_end = True
        shutil.rmtree(found[1])
        with caplog.at_level(logging.WARNING):
            assert resume.newest_whole(found[2:], asked, args, False) == (found[2], None)
        assert caplog.messages == [
            "checkpoint-8 is not the first to go on from, because its best checkpoint, checkpoint-4, is damaged: "
            f"{found[1] / 'manifest.json'} is missing",
            "checkpoint-8 is gone on from all the same: no other is whole. Its best is forgotten.",
        ]

    def test_a_state_that_is_no_longer_json_is_told_like_any_other_file(
        self, tmp_path: Path, args: TrainingArguments, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = [write(tmp_path, 4), write(tmp_path, 8)]
        state = found[1] / "trainer_state.json"
        state.write_bytes(bytes(state.stat().st_size))
        assert resume.newest_whole(found, "auto", args, False) == (found[0], None)
        assert caplog.messages == [f"checkpoint-8 cannot be gone on from: {state} is not as it was written"]

    def test_a_named_one_is_refused(self, tmp_path: Path, args: TrainingArguments) -> None:
        named = write(tmp_path, 4)
        flip_a_bit(named / "optimizer.pt")
        with pytest.raises(UserError, match=r"is not as it was written\. Name another"):
            resume.newest_whole([named], str(named), args, False)


class TestBestAtTheEnd:
    def test_one_that_others_can_write_is_read_where_that_runs_no_code(
        self, tmp_path: Path, args: TrainingArguments
    ) -> None:
        best = write(tmp_path, 4)
        best.chmod(0o777)
        assert resume.can_load_best(best, args, False, None)

    @pytest.mark.parametrize("old", ["shards/0.distcp", "model.safetensors"])
    def test_else_it_is_refused(
        self, tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch, old: str
    ) -> None:
        pickled = {"shards/0.distcp": "pytorch_model_fsdp_0/.metadata", "model.safetensors": "pytorch_model.bin"}
        files = {pickled[old] if name == old else name: content for name, content in test_store.FILES.items()}
        monkeypatch.setattr(test_store, "FILES", files)
        best = write(tmp_path, 4)
        best.chmod(0o777)
        with pytest.raises(UserError, match=r"--load_best_model_at_end from .* can be written by other users"):
            resume.can_load_best(best, args, False, None)
        assert resume.can_load_best(best, args, True, None)


class TestTrust:
    def test_a_checkpoint_of_the_run_itself_is_trusted(self, tmp_path: Path) -> None:
        resume.check_trusted(write(tmp_path, 4), tmp_path, trust_checkpoint=False)

    def test_one_from_elsewhere_is_not(self, tmp_path: Path) -> None:
        named = write(tmp_path / "elsewhere", 4)
        with pytest.raises(UserError, match=r"is not in this run's --output_dir .*--trust_checkpoint true"):
            resume.check_trusted(named, tmp_path / "out", trust_checkpoint=False)
        resume.check_trusted(named, tmp_path / "out", trust_checkpoint=True)

    def test_a_link_to_one_from_elsewhere_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        linked = tmp_path / "out" / "checkpoint-4"
        linked.symlink_to(write(tmp_path / "elsewhere", 4))
        with pytest.raises(UserError, match="is not in this run's"):
            resume.check_trusted(linked, tmp_path / "out", trust_checkpoint=False)

    @pytest.mark.parametrize("name", ["optimizer.pt", "shards", "."])
    def test_one_that_others_can_write_is_not(self, tmp_path: Path, name: str) -> None:
        folder = write(tmp_path, 4)
        (folder / name).chmod(0o777)
        with pytest.raises(UserError, match=r"can be written by other users.*pickles"):
            resume.check_trusted(folder, tmp_path, trust_checkpoint=False)

    def test_one_of_another_user_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write(tmp_path, 4)
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        with pytest.raises(UserError, match="belongs to another user"):
            resume.check_trusted(folder, tmp_path, trust_checkpoint=False)


class TestDoubts:
    def test_a_folder_that_others_can_write_is_told_at_the_start(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o775)
        assert resume.doubts_to_come(tmp_path, trust_checkpoint=False) == [
            f"--output_dir: {tmp_path} can be written by other users (`chmod go-w {tmp_path}` ends that): its "
            "checkpoints would not be gone on from without --trust_checkpoint true."
        ]
        assert resume.doubts_to_come(tmp_path, trust_checkpoint=True) == []
        tmp_path.chmod(0o755)
        assert resume.doubts_to_come(tmp_path, trust_checkpoint=False) == []


class TestFits:
    """What `write` makes is of DDP on 2 processes, with global batches of 8 rows."""

    def test_the_same_launch_goes_on_without_a_word(self, tmp_path: Path) -> None:
        assert resume.check_fits(write(tmp_path, 4), Launch("ddp", 2), OF_THIS_RUN, {}) == []

    @pytest.mark.parametrize(
        ("launch", "told"),
        [
            (
                Launch("ddp", 4),
                "ddp x 4 resumes it: rows, weights",
            ),
            (Launch("fsdp2_offload", 2), "fsdp2_offload x 2 resumes it: rows, weights"),
            (Launch("single", 1), "single x 1 resumes it"),
        ],
    )
    def test_another_that_can_go_on_is_told(self, tmp_path: Path, launch: Launch, told: str) -> None:
        (message,) = resume.check_fits(write(tmp_path, 4), launch, OF_THIS_RUN, {})
        assert message.startswith(f"checkpoint-4 was written by ddp x 2, and {told}")
        assert ("Dropout draws other numbers" in message) == (launch.world_size != 2)

    def test_zero_is_refused_with_the_launch_that_resumes(self, tmp_path: Path) -> None:
        folder = write(tmp_path, 4)
        with pytest.raises(UserError) as raised:
            resume.check_fits(folder, Launch("zero3", 2, local_world_size=2), OF_THIS_RUN, {})
        (found,) = raised.value.problems
        assert (found.code, found.flag, found.value) == ("resume-other-strategy", "--resume_from_checkpoint", folder)
        assert (found.details["before"], found.details["now"]) == ("ddp x 2", "zero3 x 2")

    @pytest.mark.parametrize("optim", ["adafactor", "paged_adamw_8bit"])
    def test_states_that_are_not_split_are_refused(self, tmp_path: Path, optim: str) -> None:
        folder, now = write(tmp_path, 4), OF_THIS_RUN | {"optim": optim}
        assert len(resume.check_fits(folder, Launch("fsdp2", 2), now, {})) == 1  # it does not name its optimizer
        (folder / "recipe.yaml").write_text(f"optim: {optim}\n", encoding="utf-8")
        with pytest.raises(UserError) as raised:
            resume.check_fits(folder, Launch("fsdp2", 2, local_world_size=2), now, {})
        assert raised.value.code == "resume-other-strategy"
        assert optim in raised.value.problems[0].details["states"]
        assert len(resume.check_fits(folder, Launch("single", 1), now, {})) == 1  # where they stay whole

    def test_a_deepspeed_file_with_another_schedule_is_refused(self, tmp_path: Path) -> None:
        folder, now = write(tmp_path, 4), {"scheduler": {"type": "WarmupLR"}}
        launch = Launch("ddp", 2, deepspeed=now)
        assert resume.check_fits(folder, launch, OF_THIS_RUN, {}) == []  # an earlier version noted nothing
        flag_files.write(folder, {"deepspeed": {"scheduler.type": "WarmupLR"}})
        assert resume.check_fits(folder, launch, OF_THIS_RUN, {}) == []
        with pytest.raises(UserError) as raised:
            resume.check_fits(folder, Launch("ddp", 2, deepspeed={}), OF_THIS_RUN, {})
        assert raised.value.problems == [
            "--deepspeed: scheduler.type WarmupLR, now (none): checkpoint-4 holds a state of the first, which the "
            "other cannot take over; make the file what it was, or start afresh in another --output_dir."
        ]

    def test_a_deepspeed_file_with_a_schedule_is_refused_where_there_was_none(self, tmp_path: Path) -> None:
        folder = write(tmp_path, 4)
        flag_files.write(folder, flag_files.read({}, {}))
        with pytest.raises(UserError, match=r"scheduler\.type \(none\), now WarmupLR: "):
            resume.check_fits(folder, Launch("ddp", 2, deepspeed={"scheduler": {"type": "WarmupLR"}}), OF_THIS_RUN, {})

    @pytest.mark.parametrize(
        ("before", "strategy", "way_out"),
        [
            ("adamw_8bit", "single", "give --optim adamw_8bit"),
            ("adamw_8bit", "fsdp2", "fsdp2 cannot run that one: go on under ddp, which wrote it"),
            ("sgd", "fsdp2", "give --optim sgd"),
        ],
    )
    def test_another_optimizer_is_refused_with_what_can_go_on(
        self, tmp_path: Path, before: str, strategy: str, way_out: str
    ) -> None:
        folder = write(tmp_path, 4, recipe=f"optim: {before}")
        with pytest.raises(UserError) as raised:
            resume.check_fits(folder, Launch(strategy, 1), OF_THIS_RUN, {})
        assert raised.value.problems == [
            f"--optim {OF_THIS_RUN['optim']}: checkpoint-4 was written with {before}, whose states are others; "
            f"{way_out}, or start afresh in another --output_dir."
        ]

    def test_another_global_batch_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError) as raised:
            resume.check_fits(write(tmp_path, 4), Launch("ddp", 2), OF_THIS_RUN | {"global_batch_size": 16}, {})
        (found,) = raised.value.problems
        assert (found.code, found.flag, found.value) == ("resume-other-global-batch", "--global_batch_size", 16)
        assert found.details["before"] == 8
