"""One rank is asked to stop, dies or hangs: all end, soon, and the message names it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from indictune.checkpoint import store
from tests.conftest import FinishedRun
from tests.faults.runs import EVALUATION, FAULTY, STEP, Job, environment, processes_of, wait_for
from tests.launch_environment import launched
from tests.ranks import test_llama
from tests.ranks.forking import Forked
from tests.ranks.launching import BIN, ROOT, SCRIPT, accelerate, begin, deepspeed, free_port, python, start, torchrun

SLOW = ("zero1", "zero2", "zero3_offload")
# With the batches of a rank in an evaluation of 13 rows, 4 at once, where a second stop comes amid the next one. Ranks
# of a group evaluate all rows together.
STRATEGIES = [
    ("ddp", None),
    pytest.param("fsdp2", 2, marks=pytest.mark.more),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("ddp", "zero3", *SLOW)),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("pipeline", "tp")),
]


@pytest.mark.parametrize(("strategy", "batches"), STRATEGIES)
def test_a_request_to_one_rank_stops_all_at_one_step(
    finished_run: FinishedRun, tmp_path: Path, strategy: str, batches: int | None
) -> None:
    unbroken = Job(finished_run.recipe, tmp_path / "unbroken", tuple(accelerate(strategy, 2)))
    result = unbroken.start()
    assert result.returncode == 0, result.stderr
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)))
    result = job.start(f"SIGTERM@{STEP}:3@1")
    assert result.returncode != 0
    assert job.status["state"] == "resumable", result.stderr
    assert job.status["message"].startswith("stopped after step 4, which is saved.")
    assert store.damage(job.folder / "checkpoint-4") == []
    if batches is not None:
        result = job.start(f"SIGTERM@{EVALUATION}:{batches + 1}@1")  # the evaluation of step 4 is made up for
        assert job.status["state"] == "resumable", result.stderr
        assert job.status["message"].startswith("stopped after step 6, which is saved.")
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken.outcome()


@contextmanager
def two_ranks(recipe: Path, folder: Path, event: str, *flags: str) -> Iterator[list[subprocess.Popen[str] | Forked]]:
    """Ranks that no launcher looks after, the second of which something happens to."""
    command = [FAULTY, event, SCRIPT, "--config", str(recipe), "--output_dir", str(folder), *flags]
    command += ["--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "no"]
    command += ["--load_best_model_at_end", "false"]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    ranks = [begin(command, {**environment(), **group, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def message_about(reporter: int, rank: int, pid: int, what: str) -> str:
    """How rank `reporter` describes a rank of this machine, itself or another."""
    shown = f"rank {rank} (process {pid} on {socket.gethostname()}) {what}"
    return f"[rank {reporter}] {shown}" if reporter else shown


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_is_named(finished_run: FinishedRun, tmp_path: Path, lost: int) -> None:
    with two_ranks(finished_run.recipe, tmp_path / "out", f"SIGKILL@{STEP}:3@{lost}") as ranks:
        other = ranks[1 - lost]
        assert ranks[lost].wait(120) == -signal.SIGKILL
        other.send_signal(signal.SIGTERM)  # as launchers do
        since = time.monotonic()
        said = other.communicate(timeout=60)[1]
    assert time.monotonic() - since < 10
    assert other.returncode == 1
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "failed"
    expected = message_about(1 - lost, lost, ranks[lost].pid, "is gone: it was killed, or died without a word")
    assert status["message"].startswith(expected)
    assert f"indictune: {expected}" in said
    assert [path.name for path in store.checkpoints_in(tmp_path / "out")] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_rank_that_waits_in_c_for_a_killed_one_ends_soon_and_names_it(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    event = f"SIGKILL@{STEP}:3@1+STUCK@{STEP}:3@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event) as (first, second):
        assert second.wait(120) == -signal.SIGKILL
        first.send_signal(signal.SIGTERM)
        since = time.monotonic()
        said = first.communicate(timeout=60)[1]
    assert time.monotonic() - since < 15
    assert first.returncode == 1
    expected = (
        f"rank 1 (process {second.pid} on {socket.gethostname()}) is gone: it was killed, or died without a word"
    )
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status == {"state": "failed", "message": expected}
    assert said.endswith(f"indictune: {expected}\n")


@pytest.mark.slow
def test_a_rank_that_waits_in_c_for_one_that_has_failed_elsewhere_ends_soon_and_says_why(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """As of another node, no launcher ends it."""
    event = f"EIO@{STEP}:3@1+STUCK@{STEP}:3@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event) as (first, second):
        assert second.wait(120) == 1
        first.communicate(timeout=60)
    assert first.returncode == 1
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "failed"
    assert "Input/output error" in status["message"]


@pytest.mark.more
def test_a_rank_that_builds_an_operator_when_another_is_stopped_leaves_no_compiler_and_no_lock(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """The next run would wait for the lock, up to 10 minutes."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/bash\n[[ " $* " == *" -c "* ]] && sleep 100\nexec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("zero2", 2)))
    event = "SLOW@indictune.distributed.zero:load_operators:1@1+SIGTERM@indictune.files:_lock_patiently:1@1"
    built = tmp_path / "operators"
    try:
        said = job.start(event, CXX=str(compiler), TORCH_EXTENSIONS_DIR=str(built)).stderr
        assert job.status["state"] == "resumable", said
        assert job.status["message"].startswith("stopped by SIGTERM before ")  # heard by rank 0, which builds
        assert [path.name for path in built.iterdir()] == ["deepspeed_shm_comm"]
        assert list(built.glob("*/lock")) == []
        assert processes_of(job.folder) == []
    finally:
        for pid in processes_of(job.folder):
            psutil.Process(pid).kill()


@pytest.mark.slow
def test_a_rank_does_not_wait_to_join_one_that_has_ended(finished_run: FinishedRun, tmp_path: Path) -> None:
    """It waits in C++, where no signal is heard, and the launcher would kill it after 30 s."""
    job = Job(finished_run.recipe, tmp_path / "out", tuple(torchrun(2)))
    said = job.start("SIGTERM@torch.distributed:init_process_group:1@1").stderr
    assert "SIGKILL" not in said
    assert job.status["state"] == "resumable", said
    assert job.status["message"].startswith("[rank 1] stopped by SIGTERM before there was anything to save.")


@pytest.mark.slow
def test_a_rank_that_has_ended_well_ends_no_other(finished_run: FinishedRun, tmp_path: Path) -> None:
    event = "STUCK@indictune.training.finish:write_metrics:1@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event) as (first, second):
        assert second.wait(120) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(7)  # the other's death, without a word, would have ended it after 4


@pytest.mark.slow
def test_a_signal_that_a_dead_ranks_launcher_sends_is_no_request_to_stop(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """It comes before there is anything to save; torchrun starts the run again, unless it was asked to stop."""
    place = "indictune.preflight.checks:preflight:1"
    with two_ranks(finished_run.recipe, tmp_path / "out", f"SIGKILL@{place}@1+SLOW@{place}@0") as (first, second):
        assert second.wait(120) == -signal.SIGKILL
        wait_for(lambda: (tmp_path / "out" / "logs" / ".ranks" / "0.json").exists(), 60)
        first.send_signal(signal.SIGTERM)
        said = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert re.search(r"indictune: rank 1 \(process \d+ on .*\) is gone", said)


@pytest.mark.slow
def test_a_rank_that_commits_no_checkpoint_looks_for_none_before_it_is_there(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """A client of NFS remembers for up to a minute that a file is missing, and a rollback would not find it."""
    event = "REFUSED@indictune.checkpoint.store:read_manifest:1@1"
    with two_ranks(finished_run.recipe, tmp_path / "out", event) as (first, second):
        said = second.communicate(timeout=120)[1]
        assert (second.returncode, first.wait(60)) == (0, 0), said
    assert store.checkpoints_in(tmp_path / "out") != []


@pytest.mark.slow
def test_no_rank_ends_before_what_it_has_saved_has_its_name(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Its launcher would then kill the one that gives the name, after 30 s."""
    event = f"SIGTERM@{STEP}:1@1+SLOW@indictune.checkpoint.store:give_name:1@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event):
        record = tmp_path / "out" / "logs" / ".ranks" / "1.json"
        wait_for(lambda: record.exists() and json.loads(record.read_text(encoding="utf-8"))["state"], 120)
        assert [path.name for path in store.checkpoints_in(tmp_path / "out")] == ["checkpoint-2"]


def assert_named(folder: Path, rank: int, pid: int, what: str) -> None:
    """The watchdog of the other of two warns of a rank while it waits for it, and the run ends with its name."""
    expected = message_about(1 - rank, rank, pid, what)
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert status["message"].startswith(expected)
    heartbeat = json.loads((folder / "logs" / ".ranks" / f"{1 - rank}.json").read_text(encoding="utf-8"))
    assert heartbeat["state"] == "failed"  # else a rank of another machine would not hear of it
    log = (folder / "logs" / f"rank-{1 - rank}.log").read_text(encoding="utf-8")
    warned = re.escape(expected.removeprefix("[rank 1] "))
    assert re.search(rf"nothing has moved for 3 s after step \d: {warned}", log)
    assert "most recent call first" in log


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_hangs_is_named(finished_run: FinishedRun, tmp_path: Path, lost: int) -> None:
    event = f"SIGSTOP@{STEP}:3@{lost}"
    with two_ranks(finished_run.recipe, tmp_path / "out", event, "--ddp_timeout", "6") as ranks:
        ranks[1 - lost].communicate(timeout=120)
        assert ranks[lost].wait(10) == -signal.SIGKILL  # it hears nothing else
    assert ranks[1 - lost].returncode == 1
    assert_named(tmp_path / "out", lost, ranks[lost].pid, "is stopped (SIGSTOP)")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "tp"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_of_a_group_that_hangs_is_named(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, lost: int
) -> None:
    """Two stages, or two parts of each matrix."""
    given = launched(ROOT / f"accelerate_configs/{strategy}.yaml").items()
    for name, value in given - os.environ.items():
        monkeypatch.setenv(name, value)
    test_a_rank_that_hangs_is_named(finished_run, tmp_path, lost)
    log = (tmp_path / "out" / "logs" / f"rank-{1 - lost}.log").read_text(encoding="utf-8")
    assert f"strategy {strategy}" in log


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_the_evaluate_command_is_named(finished_run: FinishedRun, tmp_path: Path) -> None:
    command = [*torchrun(2), FAULTY, f"SIGSTOP@{EVALUATION}:2@1", "indictune/__main__.py", "evaluate"]
    files = ["--model", str(finished_run.folder), "--test_file", str(finished_run.recipe.parent / "validation.jsonl")]
    flags = ["--output_dir", str(tmp_path), "--per_device_eval_batch_size", "2", "--ddp_timeout", "10"]
    result = start([*command, *files, *flags])
    assert result.returncode != 0
    status = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "failed"
    named = rf"rank 1 \(process \d+ on {re.escape(socket.gethostname())}\) is stopped \(SIGSTOP\)"
    assert re.search(named, status["message"]), status
    assert re.search(rf"warning: nothing has moved for 5 s after step 0: {named}", result.stderr)
    assert "most recent call first" in (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_prepares_the_rows_is_named(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    event = "SIGSTOP@indictune.data.load_rows:write_table:1@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event, "--ddp_timeout", "4") as (first, second):
        said = second.communicate(timeout=60)[1]
        assert first.wait(10) == -signal.SIGKILL
    expected = f"rank 0 (process {first.pid} on {socket.gethostname()}) is stopped (SIGSTOP)"
    assert second.returncode == 1
    assert f"[rank 1] {expected}" in said
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status == {"state": "failed", "message": f"[rank 1] {expected}"}


def held_up_by(rank: int, pid: int, step: int, place: str) -> str:
    """What is said of a rank of this machine."""
    name = f"rank {rank} (process {pid} on {socket.gethostname()})"
    return f"{name} holds up the others: since step {step} it got no further than {place}"


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_prepares_the_rows_is_named_again_and_again_and_not_ended(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might be fetching them: the run goes on when it does."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    event = "STUCK@indictune.data.load_rows:write_table:1"  # to whichever of the two is first
    logs = [tmp_path / "out" / "logs" / f"rank-{rank}.log" for rank in "01"]

    def times(sentence: str) -> list[int]:
        """In each rank's log."""
        return [log.read_text("utf-8").count(sentence) if log.is_file() else 0 for log in logs]

    with two_ranks(finished_run.recipe, tmp_path / "out", event, "--ddp_timeout", "3") as ranks:
        expected = [held_up_by(rank, each.pid, 0, "preparing the rows") for rank, each in enumerate(ranks)]
        wait_for(lambda: any(min(times(sentence)) >= 3 for sentence in expected), 100)
        assert [each.poll() for each in ranks] == [None, None]
    (holder,) = (rank for rank, sentence in enumerate(expected) if min(times(sentence)))
    assert "in acquire" not in logs[holder].read_text("utf-8")
    assert times("in _read_split")[holder] >= 3
    assert times("in acquire")[1 - holder] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("indictune.distributed.sharding:check_strategy_started", "joining the other ranks"),
        ("indictune.tasks.classification:load_classifier", "reading the weights"),
    ],
)
def test_a_rank_that_hangs_before_the_first_step_is_named(
    finished_run: FinishedRun, tmp_path: Path, place: str, shown: str
) -> None:
    flags = ("--ddp_timeout", "6")
    with two_ranks(finished_run.recipe, tmp_path / "out", f"STUCK@{place}:1@1", *flags) as (first, second):
        first.communicate(timeout=120)
    assert first.returncode == 1
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["message"].startswith(held_up_by(1, second.pid, 0, shown))


@pytest.mark.slow
def test_rank_0_is_named_where_the_others_wait_for_its_word(finished_run: FinishedRun, tmp_path: Path) -> None:
    """They do so for hours: a large model takes long to be read."""
    event = "STUCK@indictune.training.verify:_problems:1@0"
    flags = ("--ddp_timeout", "6", "--max_steps", "1")
    log = tmp_path / "out" / "logs" / "rank-1.log"
    with two_ranks(finished_run.recipe, tmp_path / "out", event, *flags) as (first, second):
        expected = held_up_by(0, first.pid, 1, "reading the saved model back")
        wait_for(log.is_file, 60)
        wait_for(lambda: log.read_text("utf-8").count(expected) >= 3, 60)
        assert second.poll() is None


@pytest.mark.slow
def test_a_rank_that_hangs_before_it_tells_anything_is_named(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", tuple(torchrun(2)), ("--ddp_timeout", "6"))
    said = job.start("STUCK@indictune.supervise.execute:unblock_stop_signals:1@1").stderr
    expected = "rank 1 holds up the others: it has not begun"
    assert job.status["message"].startswith(expected), said
    assert re.search(f"warning: nothing has moved for 3 s after step 0: {expected}", said)


def assert_holds_up(job: Job, said: str, step: int, place: str) -> None:
    """Rank 1 does, as the others say."""
    expected = rf"rank 1 \(process \d+ on .*\) holds up the others: since step {step} it got no further than {place}"
    assert re.match(expected, job.status["message"]), said
    assert re.search(f"warning: nothing has moved for 5 s after step {step}: {expected}", said)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_writes_its_shards_is_named(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("fsdp2", 2)), ("--ddp_timeout", "10"))
    said = job.start("STUCK@torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data:2@1").stderr
    assert_holds_up(job, said, 2, "having written its shards")  # of the weights, and not those of the states


@pytest.mark.slow
def test_rank_0_is_named_where_it_hangs_while_it_alone_writes_the_weights(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    event = "STUCK@indictune.training.exact_trainer:write_model:1@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", event, "--ddp_timeout", "10") as (first, second):
        second.communicate(timeout=120)
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["message"].startswith(f"[rank 1] {held_up_by(0, first.pid, 2, 'writing a checkpoint')}")


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_writes_samples_is_named(tmp_path: Path) -> None:
    sizes = ("--num_sample_generations", "2", "--max_new_tokens", "9", "--max_steps", "2", "--ddp_timeout", "10")
    flags = (*test_llama.METHODS["full"], *sizes)
    job = Job(test_llama.write_job(tmp_path), tmp_path / "out", tuple(accelerate("ddp", 2)), flags)
    said = job.start("STUCK@indictune.training.evaluation:prompt_ids:2@1", test_llama.SCRIPT).stderr
    assert_holds_up(job, said, 2, "computing a token of a sample")


FETCHING = "indictune.data.collation:IndexedRows.__getitem__:14"
FORWARD = "indictune.tasks.loss:ExactLoss.__call__:3"


@pytest.mark.slow
@pytest.mark.parametrize("event", [f"STUCK@{FETCHING}", f"STUCK@{FORWARD}", f"HELD@{FORWARD}"])
def test_a_rank_that_hangs_within_a_step_is_named(finished_run: FinishedRun, tmp_path: Path, event: str) -> None:
    """It has ended the same step as the rank that waits for it."""
    flags = ("--ddp_timeout", "6")
    with two_ranks(finished_run.recipe, tmp_path / "out", f"{event}@1", *flags) as (first, second):
        said = first.communicate(timeout=120)[1]
    assert first.returncode == 1
    assert_named(tmp_path / "out", 1, second.pid, "holds up the others: since step ")
    assert re.search(r"warning: nothing has moved for 3 s after step \d: rank 1 ", said)
    assert "Traceback" not in said
    assert "in _wait_in_c" in (tmp_path / "out" / "logs" / "rank-1.log").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "what"),
    [(f"STUCK@{FORWARD}@1", "holds up the others: since step "), (f"SIGSTOP@{STEP}:3@1", "is stopped (SIGSTOP)")],
)
def test_a_rank_that_hangs_is_named_before_a_collective_gives_up(
    finished_run: FinishedRun, tmp_path: Path, event: str, what: str
) -> None:
    """As NCCL's does: it ends its process, without a word. gloo's would raise an error."""
    events = f"{event}+SIGABRT@traceback:format_exc:1@0"
    with two_ranks(finished_run.recipe, tmp_path / "out", events, "--ddp_timeout", "30") as (first, second):
        first.communicate(timeout=120)
    assert first.returncode == 1
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["message"].startswith(message_about(0, 1, second.pid, what))


@pytest.mark.more
@pytest.mark.parametrize(
    ("event", "state"),
    [("ENOENT", "failed"), pytest.param("REFUSED", "user_error", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails_before_rank_0_has_a_log_is_heard(tmp_path: Path, event: str, state: str) -> None:
    """The launcher then asks rank 0 to stop, which has seen nothing of it."""
    decide, opened = "indictune.preflight.checks:preflight", "indictune.supervise.execute:SupervisedRun.open"
    events = f"{event}@{decide}:1@1+SLOW@{opened}:1@0"
    # Rank 1 waits up to 20 s for rank 0 to tell of it too.
    events += 5 * f"+SLOW@{decide}:1@0"
    flags = ["--config", "recipes/sentiment/demo.yaml", "--output_dir", str(tmp_path / "out")]
    said = start([*torchrun(2), FAULTY, events, "tests/faults/deciding.py", *flags]).stderr
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == state, said
    assert status["message"].startswith("[rank 1] ")
    assert said.count(f"indictune: {status['message']}") == 1


@pytest.mark.more
def test_the_error_of_the_rank_that_failed_comes_first_and_no_other_ranks_traceback(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """Rank 0 fails too, as of a broken connection."""
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("ddp", 2)))
    said = job.start(f"ENOENT@{STEP}:3@1+ECONNRESET@{STEP}:3@0").stderr
    error = "[rank 1] FileNotFoundError: [Errno 2] No such file or directory"
    assert job.status == {"state": "failed", "message": error}
    assert said.count(error) == 1
    before, _, after = said.partition(f"indictune: {error}")
    assert "Traceback" not in before
    assert "ConnectionResetError" not in after
    for rank, name in enumerate(("ConnectionResetError", "FileNotFoundError")):
        log = (job.folder / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        assert "Traceback" in log
        assert name in log


@pytest.mark.slow
def test_an_error_of_all_ranks_is_reported_once_with_its_traceback(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("ddp", 2)))
    said = job.start(f"ENOENT@{STEP}:3").stderr
    error = "FileNotFoundError: [Errno 2] No such file or directory"
    assert job.status == {"state": "failed", "message": error}
    before, _, after = said.partition(f"indictune: {error}\n")
    assert before.count("Traceback") == 1
    assert error not in after


LAUNCHERS: dict[str, list[str]] = {
    "python": python(),
    "accelerate, one process": [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--cpu"],
    "accelerate, two processes": accelerate("ddp", 2),
    "torchrun": torchrun(2),
    "deepspeed": [*deepspeed(2)],
}


def test_what_a_run_has_started_is_found_when_the_run_is_gone(tmp_path: Path) -> None:
    """Whatever its command is: else no test would see what outlives a run."""
    subprocess.run(["sh", "-c", "sleep 600 > /dev/null &"], env=environment(tmp_path / "out"), check=True)
    left = [psutil.Process(pid) for pid in processes_of(tmp_path)]
    for each in left:
        each.kill()
    assert len(left) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate, one process",  # leaves its child behind, as `deepspeed` does (below)
        pytest.param("torchrun", marks=pytest.mark.more),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("python", "accelerate, two processes", "deepspeed")),
    ],
)
def test_no_process_outlives_its_launcher(
    finished_run: FinishedRun, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), "--num_train_epochs", "500"]
    flags += ["--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    if launcher == "deepspeed":
        flags += ["--deepspeed", "ds_configs/zero2.json"]
    with subprocess.Popen(
        [*LAUNCHERS[launcher], SCRIPT, *flags],
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:
        wait_for(lambda: (tmp_path / "out" / "train_log.jsonl").exists(), 120)
        started.send_signal(number)
        # 10 s are promised on a machine that does nothing else, and took 4.7 (`benchmarks.faults`); here it tests too.
        wait_for(lambda: started.poll() is not None and not processes_of(tmp_path), 20)
    (last,) = store.checkpoints_in(tmp_path / "out")
    assert store.damage(last) == []
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "resumable"


def ranks_that_import(folder: Path) -> list[psutil.Process]:
    """Those that have begun to import torch, which takes seconds."""
    found = []
    for pid in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            launched = {"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"} & rank.environ().keys()
            if launched and any("libtorch" in mapped.path for mapped in rank.memory_maps()):
                found.append(rank)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("accelerate, one process", 1), ("deepspeed", 2)])
def test_no_process_outlives_a_launcher_that_dies_while_it_imports(
    finished_run: FinishedRun, tmp_path: Path, launcher: str, ranks: int
) -> None:
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), "--num_train_epochs", "500"]
    with subprocess.Popen([*LAUNCHERS[launcher], SCRIPT, *flags], cwd=ROOT, env=environment(tmp_path)) as started:
        wait_for(lambda: len(ranks_that_import(tmp_path)) == ranks, 120)
        started.kill()
    try:
        wait_for(lambda: not processes_of(tmp_path), 60)
        status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
        assert status["message"].startswith("stopped by SIGTERM before there was anything to save.")
    finally:
        for pid in processes_of(tmp_path):
            psutil.Process(pid).kill()


@pytest.mark.more
@pytest.mark.parametrize("launcher", ["accelerate, one process", "deepspeed"])
def test_these_launchers_leave_their_children_behind(tmp_path: Path, launcher: str) -> None:
    """Once they do not, `before_imports._end_with_launcher` may go."""
    script = tmp_path / "sleeping.py"
    script.write_text("import sys, time\nopen(sys.argv[-1], 'w').close()\ntime.sleep(600)\n", encoding="utf-8")
    begun = tmp_path / "begun"
    with subprocess.Popen(
        [*LAUNCHERS[launcher], str(script), str(begun)],
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:
        wait_for(begun.exists, 120)
        started.send_signal(signal.SIGTERM)
        started.wait(60)
    left = processes_of(tmp_path)
    for pid in left:
        psutil.Process(pid).kill()
    assert left
