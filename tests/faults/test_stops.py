"""A run that is killed or asked to stop goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indictune.checkpoint import compatibility, store
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import read_recipe
from tests.conftest import FinishedRun
from tests.faults.runs import EVALUATION, EXIT_RESUMABLE, FAULTY, SAVE, STEP, Job, best_step, wait_for
from tests.ranks import test_llama
from tests.ranks.launching import ROOT, SCRIPT, Run, accelerate, python, start, torchrun


@pytest.fixture(scope="module")
def recipe(finished_run: FinishedRun) -> Path:
    return finished_run.recipe


@pytest.fixture(scope="module")
def unbroken(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out where nothing happens."""
    job = Job(recipe, tmp_path_factory.mktemp("unbroken") / "out")
    result = job.start()
    assert result.returncode == 0, result.stderr
    return job.outcome()


@pytest.mark.parametrize(
    ("place", "step"),
    [
        pytest.param(f"{STEP}:1", 2, marks=pytest.mark.more),  # the flag is read a step later
        pytest.param(f"{STEP}:3", 4, marks=pytest.mark.slow),
        pytest.param(f"{STEP}:7", 8, marks=pytest.mark.slow),
        pytest.param(f"{EVALUATION}:1", 2, marks=pytest.mark.slow),
        (f"{EVALUATION}:6", 4),
        pytest.param(f"{SAVE}:2", 4, marks=pytest.mark.more),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, place: str, step: int
) -> None:
    job = Job(recipe, tmp_path / "out")
    result = job.start(f"SIGTERM@{place}")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status["state"] == "resumable"
    assert job.status["message"] == (
        f"stopped after step {step}, which is saved. --resume_from_checkpoint auto resumes it."
    )
    assert store.checkpoints_in(job.folder)[0].name == f"checkpoint-{step}"
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken
    assert_counts_all_starts(job)


@pytest.mark.parametrize(
    ("launcher", "call"),
    [pytest.param("python", 6, marks=pytest.mark.more), pytest.param("ddp", 4, marks=pytest.mark.slow)],
    ids=["one", "of two"],
)
def test_a_stop_between_micro_batches_finishes_the_step(
    recipe: Path, tmp_path: Path, launcher: str, call: int
) -> None:
    """Four micro-batches a step on one process, and two on two: the signal comes before the second one of step 2."""
    launch = python() if launcher == "python" else accelerate(launcher, 2)
    whole, job = (
        Job(recipe, tmp_path / name, tuple(launch), ("--per_device_train_batch_size", "2"))
        for name in ("whole", "out")
    )
    assert whole.start().returncode == 0
    result = job.start(f"SIGTERM@indictune.training.exact_trainer:ExactTrainer.training_step:{call}")
    assert result.returncode == (EXIT_RESUMABLE if launcher == "python" else 1), result.stderr
    assert job.status["state"] == "resumable"
    assert "stopped after step 2, which is saved." in job.status["message"]
    assert store.checkpoints_in(job.folder)[0].name == "checkpoint-2"
    assert job.start().returncode == 0
    assert job.outcome() == whole.outcome()


def assert_counts_all_starts(job: Job) -> None:
    """The rates of `metrics.json` are of all rows of the run: 31 in two epochs."""
    run = Run(job.folder)
    train = run.metrics["train"]
    assert train["samples_per_second"] * train["runtime_s"] == pytest.approx(62)
    assert train["tokens_per_second"] > train["samples_per_second"]
    assert train["time_to_first_step_s"] > 0
    assert all(entry["samples_per_second"] > 0 for entry in run.log)


@pytest.mark.parametrize(
    "place",
    [
        "os:fsync:9",
        *(
            pytest.param(each, marks=pytest.mark.more)
            for each in ("os:fsync:1", "pathlib:Path.rename:1", "pathlib:Path.rename:2")
        ),
    ],
)
def test_a_run_that_is_killed_while_it_saves_goes_on(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, place: str
) -> None:
    job = Job(recipe, tmp_path / "out")
    assert job.start(f"SIGKILL@{place}").returncode == -9
    for checkpoint in store.checkpoints_in(job.folder):
        assert store.damage(checkpoint) == []
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken
    assert not [path for path in job.folder.iterdir() if path.name.startswith((".unfinished", ".replaced"))]


@pytest.fixture(scope="module")
def unbroken_with_room_for_one(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What comes out where nothing happens, and each checkpoint makes room for the next."""
    alone = ("--save_total_limit", "1", "--eval_strategy", "no", "--load_best_model_at_end", "false")
    job = Job(recipe, tmp_path_factory.mktemp("unbroken_with_room_for_one") / "out", flags=alone)
    assert job.start().returncode == 0
    assert [path.name for path in store.checkpoints_in(job.folder)] == ["checkpoint-8"]
    return job


@pytest.mark.slow
@pytest.mark.parametrize(("place", "left"), [("give_name:2", [2]), ("remove:1", [4, 2])])
def test_a_checkpoint_goes_after_the_next_has_its_name(
    unbroken_with_room_for_one: Job, tmp_path: Path, place: str, left: list[int]
) -> None:
    job = replace(unbroken_with_room_for_one, folder=tmp_path / "out")
    assert job.start(f"SIGKILL@indictune.checkpoint.store:{place}").returncode == -9
    found = store.checkpoints_in(job.folder)
    assert [store.step_of(path) for path in found] == left
    assert [store.damage(path) for path in found] == [[] for _ in found]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {found[0]}" in result.stderr
    assert job.outcome() == unbroken_with_room_for_one.outcome()


def unfinished_alone(cache: Path) -> bool:
    """Whether the prepared rows are one folder that the same command goes on with."""
    return [path.name.endswith("-unfinished") for path in (cache / "prepared").iterdir() if path.is_dir()] == [True]


@pytest.mark.more
def test_a_stop_while_rows_are_prepared_leaves_only_what_the_same_command_takes(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    job = Job(recipe, tmp_path / "out")
    result = job.start("SIGTERM@indictune.data.cache:write_through:1", INDICTUNE_CACHE=str(cache))
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status == {
        "state": "resumable",
        "message": "stopped by SIGTERM before there was anything to save. The same command begins again.",
    }
    assert unfinished_alone(cache)
    assert job.start(INDICTUNE_CACHE=str(cache)).returncode == 0
    assert job.outcome() == unbroken
    assert not list(cache.glob("prepared/*-unfinished"))


@pytest.mark.slow
def test_a_stop_of_the_rank_that_prepares_rows_ends_those_that_wait_for_it(recipe: Path, tmp_path: Path) -> None:
    """They wait in C++ by then, where no signal is heard, and the launcher would kill them after 30 s."""
    job = Job(recipe, tmp_path / "out", tuple(torchrun(2)))
    stop = "SIGTERM@indictune.data.cache:write_through:1@0"
    result = job.start(stop, INDICTUNE_CACHE=str(tmp_path / "cache"))
    assert result.returncode != 0
    assert "SIGKILL" not in result.stderr
    assert job.status["state"] == "resumable"
    assert job.status["message"].startswith("stopped by SIGTERM before there was anything to save.")


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [pytest.param("python", "", marks=pytest.mark.more), pytest.param("ddp", "@1", marks=pytest.mark.slow)],
    ids=["one", "of two"],
)
def test_a_stop_before_the_first_step_waits_for_none(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, launcher: str, rank: str
) -> None:
    """What comes before it, such as DeepSpeed's build of its optimizer, may take longer than the launcher waits."""
    job = Job(recipe, tmp_path / "out", tuple(python() if launcher == "python" else accelerate(launcher, 2)))
    result = job.start(f"SIGTERM@transformers.trainer:Trainer.create_optimizer:1{rank}")
    assert result.returncode == (EXIT_RESUMABLE if launcher == "python" else 1), result.stderr
    assert job.status["state"] == "resumable"
    assert "stopped by SIGTERM before there was anything to save." in job.status["message"]
    assert store.checkpoints_in(job.folder) == []
    assert job.start().returncode == 0
    if launcher == "python":
        assert job.outcome() == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["one process", "fsdp2"])
def test_a_stop_while_shards_are_read_loses_nothing(recipe: Path, tmp_path: Path, launcher: str) -> None:
    """torch (2.13) makes a failure of its own of what is raised there."""
    whole, job = (Job(recipe, tmp_path / name, tuple(accelerate("fsdp2", 2))) for name in ("whole", "out"))
    assert job.start(f"SIGTERM@{STEP}:3").returncode != 0
    shutil.copytree(job.folder, whole.folder)
    goes_on = replace(job, launcher=tuple(python())) if launcher == "one process" else job
    reads = "torch.distributed.checkpoint.filesystem:FileSystemReader.read_data:1"
    result = goes_on.start(f"SIGTERM@{reads}")
    assert goes_on.status["state"] == "resumable", result.stderr
    assert goes_on.start().returncode == replace(goes_on, folder=whole.folder).start().returncode == 0
    assert goes_on.outcome() == whole.outcome()


@pytest.mark.more
@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.more), "SIGINT"])
def test_preparing_that_is_stopped_says_so_and_keeps_only_what_goes_on(
    recipe: Path, tmp_path: Path, name: str
) -> None:
    cache = {"INDICTUNE_CACHE": str(tmp_path / "cache")}
    prepare = ["indictune/__main__.py", "prepare", "--config", str(recipe)]
    stopped = start([*python(), FAULTY, f"{name}@indictune.data.cache:write_through:1", *prepare], cache)
    assert stopped.returncode == EXIT_RESUMABLE, stopped.stderr
    last = stopped.stderr.splitlines()[-1]
    assert last == "indictune: stopped. Nothing is left half-written; the same command begins again."
    assert "Traceback" not in stopped.stderr
    assert unfinished_alone(tmp_path / "cache")
    assert start([*python(), *prepare], cache).returncode == 0
    assert not list(tmp_path.glob("cache/prepared/*-unfinished"))


def test_a_command_that_is_interrupted_leaves_no_traceback(tmp_path: Path) -> None:
    event = "SIGINT@indictune.commands.checkpoint:read_arguments:1"
    stopped = start([*python(), FAULTY, event, "indictune/__main__.py", "checkpoint", str(tmp_path)])
    said = "indictune: stopped. Nothing is left half-written; the same command begins again.\n"
    assert (stopped.returncode, stopped.stderr) == (EXIT_RESUMABLE, said)


@pytest.mark.more
def test_a_stop_in_the_last_evaluation_loses_nothing(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    job = Job(recipe, tmp_path / "out")
    # Four evaluations of four batches come before it.
    result = job.start(f"SIGTERM@{EVALUATION}:18")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status["message"].startswith(
        "stopped while the finished model was evaluated; going on evaluates it again."
    )
    assert not (job.folder / "metrics.json").exists()
    assert job.start().returncode == 0
    assert job.outcome() == unbroken
    assert_counts_all_starts(job)


# Before it is written, and when it is to be read back.
SAVED = {
    "save_model": "the trained model was to be saved; a resumed run saves it",
    "verify_saved": "the saved model was read back; a resumed run saves it again",
}


@pytest.mark.more
@pytest.mark.parametrize("place", ["save_model", pytest.param("verify_saved", marks=pytest.mark.more)])
def test_a_stop_while_the_model_is_saved_loses_nothing(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, place: str
) -> None:
    job = Job(recipe, tmp_path / "out")
    result = job.start(f"SIGTERM@indictune.training.finish:{place}:1")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status == {
        "state": "resumable",
        "message": f"stopped while {SAVED[place]}. --resume_from_checkpoint auto resumes it.",
    }
    assert not [path.name for path in job.folder.iterdir() if path.name.startswith((".unfinished", "model."))]
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.more
def test_a_stop_of_one_rank_while_rows_are_prepared_or_a_checkpoint_is_saved_stops_all(
    recipe: Path, tmp_path: Path
) -> None:
    whole, job = (Job(recipe, tmp_path / name, tuple(accelerate("ddp", 2))) for name in ("whole", "out"))
    assert whole.start().returncode == 0
    cache = {"INDICTUNE_CACHE": str(tmp_path / "cache")}
    said = job.start("SIGTERM@indictune.data.cache:kept_in:1@1", **cache).stderr
    assert job.status["state"] == "resumable", said
    assert "stopped by SIGTERM before there was anything to save." in job.status["message"]
    said = job.start(f"SIGTERM@{SAVE}:2@1", **cache).stderr
    assert job.status["state"] == "resumable", said
    assert job.status["message"].startswith("stopped after step 4, which is saved.")
    assert job.start(**cache).returncode == 0
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("place", list(SAVED))
def test_a_stop_of_one_rank_while_a_split_model_is_saved_stops_all(recipe: Path, tmp_path: Path, place: str) -> None:
    whole = Job(recipe, tmp_path / "whole", tuple(accelerate("fsdp2", 2)))
    job = Job(recipe, tmp_path / "out", tuple(accelerate("fsdp2", 2)))
    assert whole.start().returncode == 0
    result = job.start(f"SIGTERM@indictune.training.finish:{place}:1@1")
    assert job.status["state"] == "resumable", result.stderr
    assert job.status["message"].startswith(f"stopped while {SAVED[place]}.")
    assert not [path.name for path in job.folder.iterdir() if path.name.startswith((".unfinished", "model."))]
    assert job.start().returncode == 0
    assert job.outcome() == whole.outcome()


# In the first answer, in the second, and on one of two ranks alone.
@pytest.mark.parametrize(
    ("launcher", "token"),
    [
        pytest.param("python", "3", marks=pytest.mark.slow),
        pytest.param("python", "11", marks=pytest.mark.slow),
        pytest.param("fsdp2", "3@1", marks=pytest.mark.slow),
    ],
)
def test_a_stop_while_samples_are_written_ends_the_run_and_going_on_writes_them(
    tmp_path: Path, launcher: str, token: str
) -> None:
    command = tuple(python() if launcher == "python" else accelerate(launcher, 2))
    sizes = ("--num_sample_generations", "2", "--max_new_tokens", "9", "--max_steps", "2")
    flags = (*test_llama.METHODS["full"], *sizes)
    job = Job(test_llama.write_job(tmp_path), tmp_path / "out", command, flags)
    stopped = job.start(f"SIGTERM@indictune.training.evaluation:broadcast:{token}", test_llama.SCRIPT)
    assert stopped.returncode == (EXIT_RESUMABLE if launcher == "python" else 1), stopped.stderr
    assert job.status == {
        "state": "resumable",
        "message": "stopped while the trained model wrote samples; going on writes them. "
        "--resume_from_checkpoint auto resumes it.",
    }
    assert not (job.folder / "samples.jsonl").exists()
    gone_on = job.start(script=test_llama.SCRIPT)
    assert gone_on.returncode == 0, gone_on.stderr
    assert len((job.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (job.folder / "metrics.json").exists()


@pytest.mark.slow
def test_a_stop_while_samples_are_written_loses_no_training(tmp_path: Path) -> None:
    """Where nothing was saved, the rest is done first."""
    sizes = ("--num_sample_generations", "1", "--max_new_tokens", "9", "--max_steps", "1")
    flags = (*test_llama.METHODS["full"], *sizes, "--eval_strategy", "no", "--save_strategy", "no")
    job = Job(test_llama.write_job(tmp_path), tmp_path / "out", flags=flags)
    result = job.start("SIGTERM@indictune.training.evaluation:broadcast:3", test_llama.SCRIPT)
    assert result.returncode == 0, result.stderr
    assert (job.folder / "samples.jsonl").exists()


@pytest.mark.more
def test_a_signal_to_all_processes_reaches_no_worker(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    """A group's signal hits the processes that read rows ahead, too."""
    job = Job(recipe, tmp_path / "out", flags=("--dataloader_num_workers", "2", "--max_steps", "60"))
    flags = ["--config", str(recipe), "--output_dir", str(job.folder), *job.flags, "--eval_strategy", "no"]
    flags += ["--load_best_model_at_end", "false", "--save_strategy", "no", "--logging_steps", "1"]
    command = [*python(), SCRIPT, *flags]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL) as started:
        log = job.folder / "train_log.jsonl"
        wait_for(lambda: log.exists() and bool(log.read_text(encoding="utf-8")), 60)  # the workers have started
        os.killpg(started.pid, signal.SIGTERM)
        assert started.wait(30) == EXIT_RESUMABLE, (job.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert job.status["message"].startswith("stopped after step ")


@pytest.mark.parametrize(
    ("name", "script", "recipe_name"),
    [
        pytest.param("SIGTERM", "train_sentiment", "sentiment", marks=pytest.mark.more),
        pytest.param("SIGUSR1", "train_llama", "llama", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_a_script_imports_is_heard_when_it_has(
    tmp_path: Path, name: str, script: str, recipe_name: str
) -> None:
    """A preempted job is queued again by its `status.json`."""
    flags = ["--config", f"recipes/{recipe_name}/demo.yaml", "--output_dir", str(tmp_path)]
    command = [*python(), f"scripts/{script}.py", *flags]
    number = getattr(signal, name)
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as started:
        wait_for(lambda: _holds_back(started.pid, number), 60)
        started.send_signal(number)
        _, said = started.communicate(timeout=120)
    assert started.returncode == EXIT_RESUMABLE, said
    status = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "resumable"
    assert status["message"].startswith(f"stopped by {name} before there was anything to save.")


@pytest.mark.slow
def test_a_signal_while_the_preparation_imports_is_heard_when_it_has(recipe: Path) -> None:
    command = [*python(), "-m", "indictune", "prepare", "--config", str(recipe)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as started:
        wait_for(lambda: _holds_back(started.pid, signal.SIGTERM), 60)
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=120)
    assert started.returncode == EXIT_RESUMABLE, said
    assert said.endswith("indictune: stopped. Nothing is left half-written; the same command begins again.\n")


def _holds_back(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (blocked,) = (line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(blocked, 16) >> (number - 1) & 1)


# Stopped in its last evaluation, after its last step in the middle of an epoch; and in the second of two evaluations
# of four batches, which was no better than the first.
AT_ITS_LAST_STEP = ("--max_steps", "6", "--eval_steps", "6", "--save_steps", "6")
EARLY = ("--early_stopping_patience", "1", "--learning_rate", "0", "--num_train_epochs", "9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "batch", "kept"),
    [(AT_ITS_LAST_STEP, 6, ["checkpoint-6"]), (EARLY, 10, ["checkpoint-4", "checkpoint-2"])],
    ids=["at its last step", "early"],
)
def test_a_run_that_had_ended_trains_no_further(
    recipe: Path, tmp_path: Path, flags: tuple[str, ...], batch: int, kept: list[str]
) -> None:
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start().returncode == 0
    assert job.start(f"SIGTERM@{EVALUATION}:{batch}").returncode == EXIT_RESUMABLE
    assert job.start().returncode == 0
    assert [path.name for path in store.checkpoints_in(job.folder)] == kept
    assert job.outcome(with_checkpoint=False) == whole.outcome(with_checkpoint=False)


def test_the_last_checkpoint_stays_until_the_model_is_saved(recipe: Path, tmp_path: Path) -> None:
    """`--save_total_limit 1` keeps the best; a run that is killed before it has saved resumes from the last."""
    job = Job(recipe, tmp_path / "out", flags=("--save_total_limit", "1"))
    assert job.start("SIGKILL@indictune.training.finish:save_model:1").returncode == -9
    last = store.checkpoints_in(job.folder)[0]
    assert last.name == "checkpoint-8"
    assert store.damage(last) == []


@pytest.mark.slow
def test_a_model_is_in_its_place_when_it_is_whole(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    job = Job(recipe, tmp_path / "out")
    # Written, and not yet read back.
    assert job.start("SIGKILL@indictune.training.finish:verify_saved:1").returncode == -9
    assert (job.folder / store.UNFINISHED_MODEL / "model.safetensors").is_file()
    assert not (job.folder / "model.safetensors").exists()
    assert job.start().returncode == 0
    assert not (job.folder / store.UNFINISHED_MODEL).exists()
    assert job.outcome() == unbroken


@pytest.mark.slow
def test_a_damaged_best_checkpoint_costs_no_other(recipe: Path, tmp_path: Path) -> None:
    job = Job(recipe, tmp_path / "out", flags=("--save_total_limit", "1"))
    assert job.start("SIGKILL@indictune.training.finish:save_model:1").returncode == -9
    last, first = store.checkpoints_in(job.folder)
    assert best_step(last) == store.step_of(first)
    content = bytearray((first / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (first / "model.safetensors").write_bytes(content)
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"{first / 'model.safetensors'} is not as it was written" in result.stderr
    assert f"The best checkpoint so far, {first.name}, is forgotten: " in result.stderr


@pytest.mark.slow
def test_a_best_step_that_was_not_saved_hinders_nothing(recipe: Path, tmp_path: Path) -> None:
    flags = ("--eval_steps", "1", "--save_steps", "3", "--save_total_limit", "1", "--load_best_model_at_end", "false")
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start().returncode == 0
    assert job.start(f"SIGTERM@{STEP}:5").returncode == EXIT_RESUMABLE
    last = store.checkpoints_in(job.folder)[0]
    state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
    assert not store.path_of(job.folder, state["best_global_step"]).exists()
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {last}" in result.stderr
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
@pytest.mark.parametrize(
    "event", ["SIGTERM@indictune.checkpoint.save:Checkpoints._manifest:2", f"SIGKILL@{EVALUATION}:2"]
)
def test_an_epoch_is_evaluated_though_its_last_step_was_saved_before(recipe: Path, tmp_path: Path, event: str) -> None:
    flags = ("--eval_strategy", "epoch", "--save_strategy", "steps", "--save_steps", "2", "--load_best_model_at_end")
    whole = Job(recipe, tmp_path / "whole", flags=(*flags, "false"))
    job = Job(recipe, tmp_path / "out", flags=(*flags, "false"))
    assert whole.start().returncode == 0
    job.start(event)
    assert not (job.folder / "metrics.json").exists()
    assert job.start().returncode == 0
    assert job.outcome() == whole.outcome()


IN_MID_EPOCH = ("--max_steps", "6", "--eval_strategy", "epoch")


@pytest.mark.slow
def test_a_run_whose_last_step_is_in_mid_epoch_evaluates_it_though_it_was_stopped(
    recipe: Path, tmp_path: Path
) -> None:
    flags = (*IN_MID_EPOCH, "--save_strategy", "epoch")
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start().returncode == 0
    assert job.start(f"SIGTERM@{STEP}:6").returncode == EXIT_RESUMABLE
    assert job.start().returncode == 0
    assert evaluated(job) == [4, 6]
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
def test_a_run_whose_last_step_is_in_mid_epoch_evaluates_it_though_it_was_killed(recipe: Path, tmp_path: Path) -> None:
    flags = (*IN_MID_EPOCH, "--load_best_model_at_end", "false")
    job = Job(recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGKILL@{EVALUATION}:6").returncode == -9
    assert store.checkpoints_in(job.folder)[0].name == "checkpoint-6"
    assert job.start().returncode == 0
    assert evaluated(job) == [4, 6]


def evaluated(job: Job) -> list[int]:
    """The steps that the last checkpoint knows an evaluation of."""
    return [entry["step"] for entry in job.outcome()["history"] if "eval_loss" in entry]


@pytest.mark.slow
def test_an_epoch_whose_evaluation_is_not_yet_due_is_not_evaluated_when_the_run_goes_on(
    recipe: Path, tmp_path: Path
) -> None:
    flags = ("--eval_strategy", "epoch", "--eval_delay", "2", "--load_best_model_at_end", "false")
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start().returncode == 0
    assert job.start(f"SIGKILL@{STEP}:5").returncode == -9
    assert job.start().returncode == 0
    assert job.outcome() == whole.outcome()


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(f"SIGKILL@{STEP}:5", marks=pytest.mark.slow),
        pytest.param(f"SIGTERM@{STEP}:2", marks=pytest.mark.slow),
    ],
)
def test_the_line_of_an_epoch_is_not_lost(recipe: Path, tmp_path: Path, event: str) -> None:
    flags = ("--logging_strategy", "epoch")
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start().returncode == 0
    job.start(event)
    assert job.start().returncode == 0
    assert [step for step, *_ in job.outcome()["log"]] == [4, 8]
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_not_stopped_once_its_model_is_finished(recipe: Path, tmp_path: Path) -> None:
    flags = ("--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false")
    job = Job(recipe, tmp_path / "out", flags=flags)
    result = job.start(f"SIGTERM@{EVALUATION}:2")
    assert result.returncode == 0, result.stderr
    assert job.status["state"] == "ok"
    assert Run(job.folder).metrics["eval"]["num_examples"] == 13


@pytest.mark.slow
def test_an_evaluation_that_is_made_up_for_elsewhere_changes_no_random_number(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    stopped, job = Job(recipe, tmp_path / "elsewhere"), Job(recipe, tmp_path / "out")
    assert stopped.start(f"SIGTERM@{EVALUATION}:2").returncode == EXIT_RESUMABLE
    named = ("--resume_from_checkpoint", str(stopped.folder / "checkpoint-2"), "--trust_checkpoint", "true")
    result = replace(job, flags=named).start()
    assert result.returncode == 0, result.stderr
    assert job.outcome()["weights"] == unbroken["weights"]
    assert job.outcome()["history"] == unbroken["history"]


@pytest.mark.slow
def test_an_evaluation_that_is_due_is_left_out_where_nothing_is_evaluated_any_more(
    recipe: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    rows = (recipe.parent / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    train.write_text("".join(rows[:30]), encoding="utf-8")  # of which none is a validation row
    with_rows = ("--train_file", str(train), "--validation_file", str(recipe.parent / "validation.jsonl"))
    job = Job(recipe, tmp_path / "out", flags=with_rows)
    assert job.start(f"SIGTERM@{EVALUATION}:2").returncode == EXIT_RESUMABLE
    result = replace(job, flags=(*with_rows[:2], "--validation_split", "0")).start()
    assert result.returncode == 0, result.stderr
    assert "No validation rows: " in result.stderr
    assert "eval" not in Run(job.folder).metrics
    before = ("eval_strategy", "load_best_model_at_end")
    for folder in (job.folder, store.checkpoints_in(job.folder)[0]):
        assert [compatibility.settings_of(folder)[name] for name in before] == ["no", False]
    flags = ["--config", str(job.folder / "recipe.yaml"), *with_rows]
    again = read_recipe(flags, (ModelArguments, DataArguments, SentimentTrainingArguments))
    assert again.problems == []
    assert [getattr(unresolved(SentimentTrainingArguments, again.values), name) for name in before] == ["steps", True]


@pytest.mark.slow
def test_the_means_that_trl_logs_go_on_where_they_were(tmp_path: Path) -> None:
    recipe = test_llama.write_job(tmp_path)
    flags = ("--max_steps", "8", "--logging_steps", "5")
    whole, job = Job(recipe, tmp_path / "whole", flags=flags), Job(recipe, tmp_path / "out", flags=flags)
    assert whole.start(script=test_llama.SCRIPT).returncode == 0
    assert job.start(f"SIGTERM@{STEP}:2", script=test_llama.SCRIPT).returncode == EXIT_RESUMABLE
    assert job.start(script=test_llama.SCRIPT).returncode == 0
    (first, *_) = [entry for entry in job.outcome()["history"] if "loss" in entry]
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= first.keys()
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
def test_the_mean_loss_of_a_run_that_goes_on_is_of_its_own_steps(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Not of those before, which it has yet to log. Loggers such as TensorBoard get it from the Trainer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole = Job(finished_run.recipe, tmp_path / "whole", flags=("--logging_steps", "1"))
    assert whole.start().returncode == 0
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--logging_steps", "50", "--report_to", "tensorboard"))
    job.start(f"SIGTERM@{STEP}:5")
    assert job.status["message"].startswith("stopped after step 6")
    assert job.start().returncode == 0
    events = [EventAccumulator(str(each)).Reload() for each in job.folder.glob("**/events.*")]
    (ended,) = [found for found in events if "train/train_loss" in found.Tags()["scalars"]]
    (mean,) = [each.value for each in ended.Scalars("train/train_loss")]
    assert mean == pytest.approx(sum(Run(whole.folder).series("loss")[6:8]) / 2, rel=1e-3)
