"""How a run ends: message, status and exit code, on rank 0 and on the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, Phi3Config

from indictune.checkpoint import store
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.errors import UserError
from indictune.models.classifier import check_classifier
from indictune.supervise import run as run_module
from indictune.supervise.heartbeat import Ranks, Watchdog
from indictune.supervise.run import run
from indictune.supervise.run_folder import write_status
from indictune.supervise.session import Session
from indictune.supervise.signals import Stopped
from indictune.train.nonfinite import NonFiniteLossError
from tests.checkpoint.test_store import manifest, write
from tests.supervise.test_heartbeat import having_passed
from tests.supervise.test_lock import holding

RUN = (ModelArguments, DataArguments, SentimentTrainingArguments)
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "HF_TOKEN")


@pytest.fixture(autouse=True)
def _plain_python_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.chdir(tmp_path)


def refused(*argv: str) -> Any:
    """A recipe with a problem, so that the session leaves the console and the folder of logs alone."""
    recipe = read_recipe([*argv, "--sed", "1"], RUN)
    assert recipe.problems == ["--sed: there is no such flag. Did you mean `--seed`?"]
    return recipe


def decide(session: Session) -> None:
    session.decide(SentimentTrainingArguments)
    session.recipe.problems.raise_any()


def longrope() -> Phi3Config:
    """Of a model that reads texts of up to 8 tokens alone."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    return Phi3Config(original_max_position_embeddings=8, rope_parameters=rope)


def status(folder: str = "out") -> dict[str, str]:
    return dict(json.loads(Path(folder, "status.json").read_text(encoding="utf-8")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp16_is_refused_on_a_cpu() -> None:
    assert run(decide, refused("--output_dir", "out", "--fp16", "true")) == 2
    assert "--fp16 true: needs a GPU, and there is none; give --bf16 true, or neither." in status()["message"]


def test_a_problem_of_the_user_is_told_once_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(decide, refused("--output_dir", "out")) == 2
    message = "--sed: there is no such flag. Did you mean `--seed`?"
    assert capsys.readouterr() == ("", f"indictune: {message}\n")
    assert status() == {"state": "user_error", "message": message}
    assert [path.name for path in Path("out").iterdir()] == ["status.json"]


@pytest.mark.parametrize("there", [[], ["README.md"]])
def test_without_an_output_dir_nothing_is_looked_at_or_written(
    capsys: pytest.CaptureFixture[str], there: list[str]
) -> None:
    for name in there:
        Path(name).touch()
    assert run(decide, read_recipe([], RUN)) == 2
    assert capsys.readouterr().err == (
        "indictune: --output_dir is missing: name the folder that the model and logs go to.\n"
    )
    assert [path.name for path in Path().iterdir()] == there


@pytest.mark.parametrize("content", [None, "a: [\n", "- a\n"])
def test_what_a_recipe_that_cannot_be_read_does_not_say_is_not_missing(
    capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        Path("r.yaml").write_text(content)
    for flags in ([], ["--output_dir", "out"]):
        assert run(decide, read_recipe(["--config", "r.yaml", "--sed", "1", *flags], RUN)) == 2
        first, second, third, *more = capsys.readouterr().err.splitlines()
        assert first == "indictune: 2 problems:"
        assert second.startswith("  1. --config r.yaml: ")
        assert third == "  2. --sed: there is no such flag. Did you mean `--seed`?"
        assert more == []


def test_a_failure_of_ours_ends_with_1_and_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(session: Session) -> None:
        raise ZeroDivisionError("ours")

    assert run(fail, refused("--output_dir", "out")) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("indictune: ZeroDivisionError: ours\n")
    assert status() == {"state": "failed", "message": "ZeroDivisionError: ours"}


def test_a_loss_that_went_wrong_ends_with_1_and_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(session: Session) -> None:
        raise NonFiniteLossError("The loss of step 3 is NaN")

    assert run(fail, refused("--output_dir", "out")) == 1
    assert capsys.readouterr().err == "indictune: The loss of step 3 is NaN\n"
    assert status() == {"state": "failed", "message": "The loss of step 3 is NaN"}


def test_what_was_asked_for_ends_with_0_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda session: None, refused("--output_dir", "out")) == 0
    assert capsys.readouterr() == ("", "")
    assert status() == {"state": "ok", "message": ""}


@pytest.mark.parametrize(
    ("replaceable", "way_on"),
    [((), "--resume_from_checkpoint auto goes on with it."), (("metrics.json",), "The same command begins again.")],
    ids=["training", "evaluation"],
)
def test_a_run_that_was_stopped_says_how_it_goes_on(replaceable: tuple[str, ...], way_on: str) -> None:
    def stop(session: Session) -> None:
        raise Stopped("stopped by SIGTERM.")

    assert run(stop, refused("--output_dir", "out"), replaceable) == 75
    assert status() == {"state": "resumable", "message": f"stopped by SIGTERM. {way_on}"}


def test_a_folder_that_cannot_be_written_still_gets_the_message_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").write_text("a file")
    assert run(decide, refused("--output_dir", "out")) == 2
    said = capsys.readouterr().err
    assert "2. --output_dir out: is a file; expected a folder." in said
    assert "status.json could not be written" in said


def test_to_go_on_with_another_run_is_no_way_out_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    session = Session(read_recipe(["--output_dir", "out"], RUN), rank=0)
    with holding(tmp_path / "out") as (holder, _):
        session.open_log(())
    assert session.recipe.problems == [
        f"--output_dir out: another run writes to it (process {holder.pid} on {socket.gethostname()}). Wait for its "
        "end, or name another folder."
    ]


def test_a_link_in_the_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "rank-0.log").symlink_to(outside)
    assert run(decide, read_recipe(["--output_dir", "out", "--resume_from_checkpoint", "auto"], RUN)) == 2
    assert status()["message"].startswith("--output_dir out: logs/rank-0.log is a link")
    assert outside.read_text() == "mine"


class TestOtherRanks:
    def test_they_leave_message_and_status_to_rank_0(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        rank_0 = threading.Timer(0.3, write_status, (Path("out"), "user_error", "of rank 0"))
        rank_0.start()
        began = time.monotonic()
        assert run(decide, refused("--output_dir", "out")) == 2
        assert 0.2 < time.monotonic() - began < run_module.SECONDS_FOR_RANK_0["user_error"]
        assert capsys.readouterr() == ("", "")
        assert status()["message"] == "of rank 0"

    def test_they_speak_up_where_rank_0_has_no_problem(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setitem(run_module.SECONDS_FOR_RANK_0, "user_error", 0.2)
        write_status(Path("out"), "ok", "of the run before")
        time.sleep(0.05)
        assert run(decide, refused("--output_dir", "out")) == 2
        assert capsys.readouterr().err == (
            "indictune: [rank 1] --sed: there is no such flag. Did you mean `--seed`?\n"
        )
        assert status()["message"].startswith("[rank 1] --sed")

    @pytest.mark.parametrize(
        "what",
        [
            "is gone: it was killed, or died without a word",
            "holds up the others: since step 0 it came no further than the start",
        ],
    )
    def test_they_do_not_wait_for_the_word_of_a_rank_0_that_is_dead_or_late(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        rank_0 = Ranks.of_launch(Path("out/logs"), os.environ)
        if what.startswith("is gone"):
            with subprocess.Popen(["true"]) as process:
                rank_0._mine["pid"] = process.pid
        Path("out/logs").mkdir(parents=True)
        rank_0.begin()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.delitem(run_module.SECONDS_FOR_RANK_0, "failed")  # nobody asks for how long

        def lose(session: Session) -> None:
            session.watchdog = Watchdog(session.ranks, 9.0, Path("out/logs/rank-1.log"), pytest.fail, pytest.fail)
            session.watchdog.progress = having_passed(1)
            session.watchdog.progress._last -= 10
            session.ranks.at(session.watchdog.progress)
            raise ConnectionResetError("by peer")

        assert run(lose, refused("--output_dir", "out")) == 1
        name = f"rank 0 (process {rank_0._mine['pid']} on {socket.gethostname()})"
        told = f"[rank 1] {name} {what}; ConnectionResetError: by peer"
        assert status()["message"] == told
        assert capsys.readouterr().err.count(f"indictune: {told}") == 1

    @pytest.mark.parametrize("has_console", [True, False])
    def test_they_hear_of_an_end_by_the_watchdog(self, monkeypatch: pytest.MonkeyPatch, has_console: bool) -> None:
        """Also where nobody else does; those of another launcher would wait for it for ever."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        Path("out/logs").mkdir(parents=True)
        session = Session(refused("--output_dir", "out"), rank=0)
        session.ranks.begin()
        if not has_console:
            with Path("console").open("w") as closed:
                monkeypatch.setattr("sys.stderr", closed)
        ending = get_context("fork").Process(target=run_module._end, args=(session, time.time(), "rank 1 hangs"))
        ending.start()
        ending.join()
        assert ending.exitcode == 1
        assert Path("out/status.json").exists() == has_console
        monkeypatch.setenv("RANK", "1")
        assert Ranks.of_launch(Path("out/logs"), os.environ).left() == (0, "failed", "rank 1 hangs")

    def test_they_know_their_launch_though_a_library_changes_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = refused("--output_dir", "out")
        ours, another = Session(recipe, rank=1), Session(recipe, rank=1)
        another._launch_name = "another"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        (tmp_path / "out").mkdir()
        with holding(tmp_path / "out", ours._launch_name):
            assert (ours.has_folder, another.has_folder) == (True, False)

    def test_one_that_did_what_was_asked_waits_for_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        began = time.monotonic()
        assert run(lambda session: None, refused("--output_dir", "out")) == 0
        assert time.monotonic() - began < 1
        assert not Path("out").exists()


class TestDecide:
    @staticmethod
    def session(*argv: str) -> Session:
        return Session(read_recipe(argv, RUN), rank=0)

    def test_accumulation_follows_from_the_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        argv = ("--output_dir", "out", "--global_batch_size", "48", "--per_device_train_batch_size", "8")
        alone = self.session(*argv)
        decide(alone)
        assert alone._decided["gradient_accumulation_steps"] == 6
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
        ranks = self.session(*argv)
        decide(ranks)
        assert ranks._decided["gradient_accumulation_steps"] == 2
        assert (ranks.launch.strategy, ranks.launch.world_size) == ("ddp", 3)

    @pytest.mark.parametrize("ampere", [True, False])
    @pytest.mark.parametrize(
        ("flags", "tf32"),
        [
            (("--bf16", "true"), True),
            (("--bf16", "true", "--torch_compile", "true"), True),
            (("--torch_compile", "true"), False),
            (("--torch_compile_mode", "max-autotune"), False),
            ((), None),
        ],
    )
    def test_half_precision_takes_tf32_where_the_gpu_has_it_and_a_compiled_model_in_fp32_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ampere: bool, flags: tuple[str, ...], tf32: bool | None
    ) -> None:
        """A T4 and a V100 have none, and transformers refuses the flag there."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where torch keeps what it compiles
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("indictune.distributed.tf32.is_torch_tf32_available", lambda: ampere)
        session = self.session("--output_dir", "out", *flags)
        decide(session)
        assert session._decided.get("tf32") is (tf32 if ampere else None)
        asked = self.session("--output_dir", "out", *flags, "--tf32", "true")
        decide(asked)
        assert "tf32" not in asked._decided

    def test_an_optimizer_that_the_strategy_cannot_run_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        argv = ("--output_dir", "out", "--optim", "paged_adamw_8bit")
        decide(self.session(*argv))
        for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=r"^--optim paged_adamw_8bit: .* weights that fsdp2 has split"):
            decide(self.session(*argv))

    def test_every_check_has_its_say_in_one_raise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        session = self.session(
            *("--output_dir", "out", "--sed", "1", "--resume_from_checkpoint", "no", "--push_to_hub"),
            *("--global_batch_size", "7", "--logging_nan_inf_filter", "true"),
        )
        with session.checks():
            raise UserError("of the script")
        session.decide(SentimentTrainingArguments)
        with pytest.raises(UserError) as raised:
            session.recipe.problems.raise_any()
        assert [problem.split()[0].rstrip(":") for problem in raised.value.problems] == [
            "--sed", "of", "--resume_from_checkpoint", "--push_to_hub", "--logging_nan_inf_filter",
            "--global_batch_size",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ((), "--max-restarts 3: what the launcher starts again has the same flags, and would be refused"),
            (
                ("--resume_from_checkpoint", "out/checkpoint-4"),
                "--resume_from_checkpoint out/checkpoint-4: with --max-restarts 3 each start would go on from there",
            ),
        ],
    )
    def test_restarts_that_would_not_go_on_are_refused_with_all_other_problems(
        self, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], told: str
    ) -> None:
        write(Path("out"), 4)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        with pytest.raises(UserError) as raised:
            decide(self.session("--output_dir", "out", "--sed", "1", *asked))
        of_the_flag, of_the_launch = raised.value.problems[:2]
        assert of_the_flag.startswith("--sed: ")
        assert of_the_launch.startswith(told)
        decide(self.session("--output_dir", "new", "--resume_from_checkpoint", "auto"))
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
        decide(self.session("--output_dir", "new"))

    def test_restarts_on_several_nodes_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        for name, value in {**group, "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
            monkeypatch.setenv(name, value)
        flags = ("--output_dir", "out", "--resume_from_checkpoint", "auto")
        with pytest.raises(UserError, match=r"^--max-restarts 3: on several nodes .* Leave it out, "):
            decide(self.session(*flags))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        decide(self.session(*flags))

    def test_a_deepspeed_file_is_compared_with_the_batch_that_follows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        session = self.session("--output_dir", "out", "--deepspeed", '{"gradient_accumulation_steps": 2}')
        session.decide(SentimentTrainingArguments)  # 64 = 2 ranks x 8 rows x 4
        with pytest.raises(UserError, match=r"gradient_accumulation_steps = 2, and .* is 4"):
            session.recipe.problems.raise_any()

    def test_a_folder_that_zero_would_not_find_again_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        session = self.session("--output_dir", "out[1]", "--deepspeed", '{"zero_optimization": {"stage": 2}}')
        session.decide(SentimentTrainingArguments)
        with pytest.raises(UserError, match=r"--output_dir out\[1\]: DeepSpeed, which zero2 runs on, finds no"):
            session.recipe.problems.raise_any()

    @pytest.mark.parametrize(
        ("asked", "refused_for"),
        [
            ((), ["--max_length 9"]),
            (("--resume_from_checkpoint", "auto"), ["--max_length 9"]),
            (("--resume_from_checkpoint", "old/checkpoint-4"), []),
            (("--resume_from_checkpoint", "auto", "--output_dir", "old"), []),
        ],
    )
    def test_only_a_new_run_is_refused_texts_that_longrope_reads_otherwise(
        self, asked: tuple[str, ...], refused_for: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """An older one may have such texts, and no others to go on with."""
        write(Path("old"), 4)
        session = self.session("--output_dir", "out", *asked)
        session.check_model(session.build(ModelArguments), longrope(), 9, lambda *_: None)
        assert [problem.partition(":")[0] for problem in session.recipe.problems] == refused_for
        assert ("has more than 8 tokens (longrope), so that the result depends on" in caplog.text) != bool(refused_for)

    def test_where_nodes_have_disks_of_their_own_a_new_one_does_not_refuse_such_texts(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run may have begun on the others; without auto it has not."""
        for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        told = "has more than 8 tokens (longrope), so that the result depends on"
        for asked, is_refused in ((("--resume_from_checkpoint", "auto"), False), ((), True)):
            caplog.clear()
            session = self.session("--output_dir", "out", *asked)
            session.check_model(session.build(ModelArguments), longrope(), 9, lambda *_: None)
            problems = list(session.recipe.problems)
            assert [told in caplog.text, bool(problems)] == [not is_refused, is_refused]

    def test_an_adapter_on_another_commit_of_the_hub_is_refused(self) -> None:
        noted = {"name": "me/base", "revision": "main", "commit_hash": "abc"}
        checkpoint = write(Path("out"), 4)
        (checkpoint / "base_model.json").write_text(json.dumps(noted))
        digests = store.settle(checkpoint, store.files_in(checkpoint))
        (checkpoint / store.MANIFEST).write_text(manifest(4, files=digests).to_json())
        session = self.session("--output_dir", "out", "--resume_from_checkpoint", "auto", "--method", "lora")
        config = BertConfig()
        config._commit_hash = "def"
        session.check_model(session.build(ModelArguments), config, 32, check_classifier)
        session.decide(SentimentTrainingArguments)
        with pytest.raises(UserError, match="is an adapter on commit abc of me/base, and this is commit def"):
            session.recipe.problems.raise_any()
