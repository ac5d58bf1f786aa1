"""Schedulers and launchers that start a run again: nobody has to lend a hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from indictune.checkpoint import store
from indictune.supervise import run_folder
from tests.conftest import FinishedRun
from tests.faults.runs import STEP, Job, environment, processes_of, wait_for
from tests.ranks.launching import BIN, ROOT, SCRIPT, free_port, path, python, torchrun

# A job asks each process of its id on the machine: two tests at once are two jobs.
JOB_ID = str(os.getpid())

# What SLURM's commands do on one node.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") echo 127.0.0.1 ;;
    "show job") echo "   Requeue=${REQUEUE:-1} Restarts=0 BatchFlag=1" ;;
    *) echo "$@" >> "$CALLS" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    return {
        **environment(),
        "PATH": f"{commands}{os.pathsep}{path()}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_NNODES": "1",
        "MAIN_PROCESS_PORT": str(free_port()),
    }


def to_the_script(started: subprocess.Popen[bytes]) -> None:
    """As five minutes before the end of the time, or with `PreemptParameters=send_user_signal`."""
    started.send_signal(signal.SIGUSR1)


def steps_of(started: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What srun has started: tasks, launchers, ranks."""
    return [each for each in psutil.Process(started.pid).children(recursive=True) if "SLURM_NODEID" in each.environ()]


def to_tasks(started: subprocess.Popen[bytes]) -> None:
    """As before a preemption, where SLURM knows the tasks alone."""
    steps_of(started)[0].send_signal(signal.SIGTERM)


def to_steps(started: subprocess.Popen[bytes]) -> None:
    """As before a preemption, where each process of the steps gets it."""
    for each in steps_of(started):
        each.send_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes"), [("ddp", "2"), ("single_gpu", "1")])
@pytest.mark.parametrize("ask", [to_the_script, to_tasks, to_steps])
def test_a_slurm_job_saves_is_queued_again_and_goes_on(
    finished_run: FinishedRun,
    slurm: dict[str, str],
    tmp_path: Path,
    strategy: str,
    processes: str,
    ask: Callable[[subprocess.Popen[bytes]], None],
) -> None:
    out, calls = tmp_path / "out", tmp_path / "calls"
    variables = {**slurm, "PROCESSES_PER_NODE": processes}
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(out), "--num_train_epochs", "20"]
    job = ["bash", "scripts/slurm/train.sbatch", f"accelerate_configs/{strategy}.yaml", SCRIPT, *flags]
    sleeper = [*python(), "-c", "import time; time.sleep(600)", "-u", SCRIPT]
    rank_of_another_job = {**variables, "SLURM_JOB_ID": f"{JOB_ID}7", "ACCELERATE_MIXED_PRECISION": "no"}
    with (
        subprocess.Popen(sleeper, env=rank_of_another_job) as another,
        subprocess.Popen(sleeper, env=variables) as no_rank,
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(job, cwd=ROOT, env=variables, stderr=said) as started,
    ):
        try:
            wait_for(lambda: (out / "train_log.jsonl").exists(), 180)
            ask(started)
            assert started.wait(90) == 0
            assert [another.poll(), no_rank.poll()] == [None, None]
        finally:
            for each in (another, no_rank, started):
                each.kill()
    assert "death signal" not in (tmp_path / "said").read_text(encoding="utf-8")  # torch's launcher has heard nothing
    assert calls.read_text(encoding="utf-8") == f"requeue {JOB_ID}\n"
    assert '"state": "resumable"' in (out / "status.json").read_text(encoding="utf-8")

    # Queued again, it trains to its end.
    again = subprocess.run(job, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "Resuming from " in again.stderr
    assert (out / "metrics.json").exists()
    assert calls.read_text(encoding="utf-8") == f"requeue {JOB_ID}\n"


def launches(started: subprocess.Popen[bytes]) -> bool:
    """Whether a job's launcher is there, which imports for seconds before it starts a rank."""
    return any(str(BIN / "accelerate") in each.cmdline() for each in steps_of(started))


@pytest.mark.slow
@pytest.mark.parametrize("ask", [to_the_script, to_tasks])
def test_a_slurm_job_that_is_asked_before_its_ranks_are_there_asks_them_when_they_are(
    finished_run: FinishedRun, slurm: dict[str, str], tmp_path: Path, ask: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    out = tmp_path / "out"
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(out), "--num_train_epochs", "500"]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/single_gpu.yaml", SCRIPT, *flags]
    with subprocess.Popen(job, cwd=ROOT, env={**slurm, "PROCESSES_PER_NODE": "1"}) as started:
        try:
            wait_for(lambda: launches(started), 60)
            ask(started)
            assert started.wait(180) == 0
        finally:
            started.kill()
    assert '"state": "resumable"' in (out / "status.json").read_text(encoding="utf-8")
    assert (tmp_path / "calls").read_text(encoding="utf-8") == f"requeue {JOB_ID}\n"


SHORT_SLEEP = "#!/bin/bash\nexec /bin/sleep 0.05\n"
# In place of accelerate's launcher, whose rank saves and ends when it is asked.
LAUNCHER = """#!/bin/bash
shift
while [ "${{1#--}}" != "$1" ]; do shift 2; done
ACCELERATE_MIXED_PRECISION=no exec {python} "$@"
"""
RANK = """import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
def save_and_end(*_):
    (out / "status.json").write_text('{"state": "resumable"}')
    sys.exit(75)
signal.signal(signal.SIGUSR1, save_and_end)
(out / "begun").touch()
time.sleep(600)
"""


def test_a_slurm_job_finds_its_ranks_whatever_the_script_is_called(slurm: dict[str, str], tmp_path: Path) -> None:
    script, out, commands = (
        tmp_path / r"a+b (c [d] {e} ^f$ g|h *? .i \\." / "train.py",
        tmp_path / "out",
        tmp_path / "bin",
    )
    for folder in (script.parent, out):
        folder.mkdir()
    script.write_text(RANK, encoding="utf-8")
    for name, text in (("accelerate", LAUNCHER.format(python=sys.executable)), ("sleep", SHORT_SLEEP)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", str(script), "--output_dir", str(out)]
    variables = {**slurm, "PROCESSES_PER_NODE": "1"}
    with subprocess.Popen(job, cwd=ROOT, env=variables, start_new_session=True) as started:
        try:
            wait_for((out / "begun").exists, 60)
            started.send_signal(signal.SIGUSR1)
            assert started.wait(30) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert (tmp_path / "calls").read_text(encoding="utf-8") == f"requeue {JOB_ID}\n"


@pytest.mark.slow
def test_a_slurm_job_that_ends_before_it_can_save_is_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    """Its ranks were killed before one could tell anything; an attempt before has failed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "status.json").write_text('{"state": "failed", "message": "x"}', encoding="utf-8")
    begun = tmp_path / "begun"
    killed = f'#!/bin/bash\n[ "$1" = --overlap ] || {{ echo > {begun}; sleep 3; exit 137; }}\n'
    (tmp_path / "bin" / "srun").write_text(killed, encoding="utf-8")
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT]
    with subprocess.Popen([*job, "--output_dir", str(tmp_path / "out")], cwd=ROOT, env=slurm) as started:
        wait_for(begun.exists, 60)
        started.send_signal(signal.SIGUSR1)
        assert started.wait(60) == 0
    assert (tmp_path / "calls").read_text(encoding="utf-8") == f"requeue {JOB_ID}\n"


# A clock that leaps, for what happens after minutes.
DATE = """#!/bin/bash
echo >> "$CALLS.clock"
echo $((100 * $(wc -l < "$CALLS.clock")))
"""


@pytest.mark.more
@pytest.mark.parametrize("may_be_queued_again", [True, False])
def test_a_slurm_job_whose_ranks_do_not_end_is_queued_again_before_its_time_is_over(
    slurm: dict[str, str], tmp_path: Path, may_be_queued_again: bool
) -> None:
    begun, commands = tmp_path / "begun", tmp_path / "bin"
    hanging = f'#!/bin/bash\n[ "$1" = --overlap ] || {{ echo > {begun}; exec tail --pid {os.getpid()} -f {begun}; }}\n'
    (commands / "srun").write_text(hanging, encoding="utf-8")
    for name, text in (("date", DATE), ("sleep", SHORT_SLEEP)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT]
    job += ["--output_dir", str(tmp_path / "out")]
    variables = {**slurm, "REQUEUE": str(int(may_be_queued_again))}
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(job, cwd=ROOT, env=variables, stderr=said, start_new_session=True) as started,
    ):
        try:
            wait_for(begun.exists, 60)
            started.send_signal(signal.SIGTERM)  # a preemption has a time of its own
            with pytest.raises(subprocess.TimeoutExpired):
                started.wait(3)
            started.send_signal(signal.SIGUSR1)
            if may_be_queued_again:
                assert started.wait(60) == 0
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    started.wait(5)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
    assert (tmp_path / "calls").exists() == may_be_queued_again
    assert (
        (tmp_path / "said")
        .read_text(encoding="utf-8")
        .startswith(
            "train.sbatch: the ranks still run 4 minutes after the request to stop, and the time is nearly over\n"
        )
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "seconds_left", "is_a_link", "ends"),
    [
        ("USR1", 300, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in (
                ("USR1", None, False, True),
                ("USR1", 3600, False, False),  # a preemption with `PreemptParameters=send_user_signal`
                ("TERM", None, False, False),
                ("TERM", 300, False, False),  # the end was put off by `scontrol update` since
            )
        ),
    ],
)
def test_a_slurm_job_that_reaches_its_end_twice_and_saves_nothing_ends(
    slurm: dict[str, str], tmp_path: Path, name: str, seconds_left: int | None, is_a_link: bool, ends: bool
) -> None:
    """Preparation or an evaluation takes longer than `--time`; a preemption may come twice, and is no such end."""
    out = tmp_path / "out"
    if is_a_link:
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    else:
        out.mkdir()
    stopped = f"""#!/bin/bash
[ "$1" = --overlap ] && exit
kill -{name} $PPID
echo '{{"state": "resumable"}}' > {out}/status.json
$SAVES
exit 75
"""
    (tmp_path / "bin" / "srun").write_text(stopped, encoding="utf-8")
    (tmp_path / "bin" / "sleep").write_text(SHORT_SLEEP, encoding="utf-8")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT, "--output_dir", str(out)]
    end = {} if seconds_left is None else {"SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left)}

    def attempt(number: str = JOB_ID, saves: int | None = None) -> tuple[int, str]:
        saving = "" if saves is None else f"mkdir {out}/checkpoint-{saves}"
        variables = {**slurm, **end, "SLURM_JOB_ID": number, "SAVES": saving}
        ended = subprocess.run(job, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    again = (0, "")
    assert [attempt(), attempt(saves=9), attempt(), attempt(saves=10), attempt()] == 5 * [again]
    assert attempt(f"{JOB_ID}8") == again  # another job, perhaps with more time
    ended = (
        75,
        f"train.sbatch: the job has come no further than {out}/checkpoint-10 for the second time, and is not queued "
        "again. Give it a longer --time: it must read the rows, evaluate and save 5 minutes before its end\n",
    )
    assert attempt(f"{JOB_ID}8") == (ended if ends else again)


def test_only_the_user_can_write_to_the_folder_of_a_stalled_slurm_job(slurm: dict[str, str], tmp_path: Path) -> None:
    """With any umask: a run does not resume from a folder that others can write to."""
    stopped = '#!/bin/bash\n[ "$1" = --overlap ] && exit\nkill -USR1 $PPID\nexit 1\n'
    (tmp_path / "bin" / "srun").write_text(stopped, encoding="utf-8")
    (tmp_path / "bin" / "sleep").write_text(SHORT_SLEEP, encoding="utf-8")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT]
    variables = {**slurm, "SLURM_JOB_ID": JOB_ID, "SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    out = tmp_path / "runs" / "out"
    subprocess.run([*job, "--output_dir", str(out)], cwd=ROOT, env=variables, umask=0o002, check=False)
    assert (out / ".stalled").read_text(encoding="utf-8").split() == [JOB_ID]
    assert out.stat().st_mode & 0o777 == 0o755


@pytest.mark.more
@pytest.mark.parametrize("cores", ["64", pytest.param(None, marks=pytest.mark.more)])
def test_a_slurm_jobs_ranks_have_the_cores_that_it_has(
    slurm: dict[str, str], tmp_path: Path, cores: str | None
) -> None:
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\necho "${SRUN_CPUS_PER_TASK-none}"\n', encoding="utf-8")
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT]
    job += ["--output_dir", str(tmp_path / "out")]
    variables = slurm if cores is None else {**slurm, "SLURM_CPUS_PER_TASK": cores}
    ended = subprocess.run(job, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.stdout == f"{cores or 'none'}\n"


@pytest.mark.more
@pytest.mark.parametrize("may_be_queued_again", [pytest.param(True, marks=pytest.mark.more), False])
def test_a_slurm_job_that_is_not_to_be_queued_again_ends_as_its_ranks_do(
    slurm: dict[str, str], tmp_path: Path, may_be_queued_again: bool
) -> None:
    """`scontrol update JobId=7 Requeue=0` says so."""
    out = tmp_path / "out"
    out.mkdir()
    stopped = f'#!/bin/bash\necho \'{{"state": "resumable"}}\' > {out}/status.json\nexit 75\n'
    (tmp_path / "bin" / "srun").write_text(stopped, encoding="utf-8")
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT, "--output_dir", str(out)]
    variables = {**slurm, "REQUEUE": str(int(may_be_queued_again))}
    ended = subprocess.run(job, cwd=ROOT, env=variables, check=False)
    assert ended.returncode == (0 if may_be_queued_again else 75)
    assert (tmp_path / "calls").exists() == may_be_queued_again


@pytest.mark.parametrize("command", ["show job", "requeue"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_slurm_job_whose_controller_is_away_waits_for_it_and_then_says_what_to_type(
    slurm: dict[str, str], tmp_path: Path, command: str, times: int
) -> None:
    out, commands = tmp_path / "out", tmp_path / "bin"
    out.mkdir()
    stopped = f'#!/bin/bash\necho \'{{"state": "resumable"}}\' > {out}/status.json\nexit 75\n'
    (commands / "srun").write_text(stopped, encoding="utf-8")
    fails = f"""case "$1 $2" in "{command}"*) echo >> {tmp_path}/tried
    [ "$(wc -l < {tmp_path}/tried)" -le {times} ] && exit 1 ;; esac\n"""
    (commands / "scontrol").write_text(SCONTROL.replace("case", fails + "case", 1), encoding="utf-8")
    (commands / "sleep").write_text("#!/bin/bash\n", encoding="utf-8")
    (commands / "sleep").chmod(0o755)
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT, "--output_dir", str(out)]
    ended = subprocess.run(job, cwd=ROOT, env=slurm, capture_output=True, text=True, check=False)
    assert ended.returncode == (75 if times == 9 else 0)
    assert (tmp_path / "calls").exists() == (times == 1)
    assert (f"type: scontrol requeue {JOB_ID}\n" in ended.stderr) == (times == 9)


OTHER_SPELLINGS = ("--output_dir={}", "--output-dir {}", "--output-dir={}")


@pytest.mark.more
@pytest.mark.parametrize(
    "written", ["--output_dir {}", *(pytest.param(each, marks=pytest.mark.more) for each in OTHER_SPELLINGS)]
)
def test_a_slurm_job_that_dies_early_is_not_requeued_for_an_old_status(
    slurm: dict[str, str], tmp_path: Path, written: str
) -> None:
    run_folder.write_status(tmp_path / "out", "resumable", "stopped after step 4, which is saved.")
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 3\n", encoding="utf-8")
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT]
    ended = subprocess.run([*job, *written.format(tmp_path / "out").split()], cwd=ROOT, env=slurm, check=False)
    assert ended.returncode == 3
    assert not (tmp_path / "calls").exists()


def test_a_slurm_job_without_an_output_dir_is_refused() -> None:
    job = ["bash", "scripts/slurm/train.sbatch", "accelerate_configs/ddp.yaml", SCRIPT, "--config", "r.yaml"]
    refused = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "train.sbatch: --output_dir is missing: name it here, even if the recipe does\n"


@pytest.mark.parametrize("words", [[], ["accelerate_configs/ddp.yaml"]])
def test_a_slurm_job_without_a_script_says_what_it_takes(words: list[str]) -> None:
    job = ["bash", "scripts/slurm/train.sbatch", *words]
    refused = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == (
        "train.sbatch: expected CONFIG SCRIPT FLAGS, such as accelerate_configs/ddp.yaml scripts/train_sentiment.py "
        "--config recipes/sentiment/indicbert_v2.yaml --output_dir out\n"
    )


STALE = """
import os, torch
store, rank, _ = next(torch.distributed.rendezvous("env://"))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store.set("address", "of a dead process")
    raise SystemExit(1)
print("found", store.check(["address"]))
"""


@pytest.mark.slow
def test_torchrun_still_keeps_the_output_of_dead_processes(tmp_path: Path) -> None:
    """When this fails, `distributed/elastic.py` is needed no more."""
    (tmp_path / "stale.py").write_text(STALE, encoding="utf-8")
    command = [str(BIN / "torchrun"), "--standalone", "--max-restarts", "1", str(tmp_path / "stale.py")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert "found True" in result.stdout


@pytest.mark.more
@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_torchrun_restarts_a_run_whose_rank_was_killed_or_stopped(
    finished_run: FinishedRun, tmp_path: Path, name: str
) -> None:
    unbroken = Job(finished_run.recipe, tmp_path / "unbroken", tuple(torchrun(2)))
    assert unbroken.start().returncode == 0
    launcher = (*torchrun(2), "--max-restarts", "1")
    job = Job(finished_run.recipe, tmp_path / "out", launcher, ("--ddp_timeout", "20"))
    # The restarted rank has three steps to go, and none of them is a sixth.
    result = job.start(f"{name}@{STEP}:6@1")
    assert result.returncode == 0, result.stderr
    log = (job.folder / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert f"Resuming from {job.folder / 'checkpoint-4'}\n" in log
    assert job.outcome() == unbroken.outcome()


@pytest.mark.more
def test_torchrun_tells_that_it_would_start_what_does_not_go_on(finished_run: FinishedRun, tmp_path: Path) -> None:
    named = ("--resume_from_checkpoint", str(finished_run.folder / "checkpoint-8"), "--trust_checkpoint", "true")
    job = Job(finished_run.recipe, tmp_path / "out", (*torchrun(1), "--max-restarts", "1"), named)
    assert job.start().returncode != 0
    assert job.status["message"].startswith(f"{' '.join(named[:2])} with --max-restarts 1: ")
    assert job.status["message"].endswith("[restarts-from-named-checkpoint]")


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_did_not_save_when_asked(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", (*torchrun(2), "--max-restarts", "3"))
    result = job.start(f"SIGTERM@{STEP}:3")  # of each rank, in each start
    assert result.returncode != 0
    assert job.status["state"] == "resumable"
    assert job.status["message"].startswith("stopped after step 4, which is saved."), result.stderr
    assert [path.name for path in store.checkpoints_in(job.folder)] == ["checkpoint-4", "checkpoint-2"]
    assert "Resuming from" not in (job.folder / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert processes_of(job.folder) == []


LISTENING = "indictune.supervise.execute:unblock_stop_signals"


# The other rank is held up for longer; or it waits for this one in C++, where it hears no signal.
@pytest.mark.slow
@pytest.mark.parametrize("held_up", [2, 0])
def test_torchrun_restarts_a_run_whose_rank_was_killed_before_its_first_report(
    finished_run: FinishedRun, tmp_path: Path, held_up: int
) -> None:
    """Its launcher asks the other one to stop, which has nobody's word that this is no request."""
    launcher = (*torchrun(2), "--max-restarts", "1")
    # Of a fork, nobody sees the environment.
    job = Job(finished_run.recipe, tmp_path / "out", launcher, ("--max_steps", "2"), anew=True)
    events = [f"SIGKILL@{LISTENING}:1@1@0", f"SLOW@{LISTENING}:1@1@0", *held_up * [f"SLOW@{LISTENING}:1@0@0"]]
    result = job.start("+".join(events))
    assert result.returncode == 0, result.stderr
    assert "indictune: rank 1 is gone: it was killed, or died without a word, before it had begun\n" in result.stderr
    assert job.status["state"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "held_up"), [(0, 3), (1, 3), (1, 0)])
def test_a_request_before_a_rank_tells_anything_is_no_death(
    finished_run: FinishedRun, tmp_path: Path, asked: int, held_up: int
) -> None:
    """It has left when the other one, held up or in C++, looks around."""
    job = Job(finished_run.recipe, tmp_path / "out", (*torchrun(2), "--max-restarts", "1"), anew=True)
    result = job.start("+".join([f"SIGTERM@{LISTENING}:1@{asked}", *held_up * [f"SLOW@{LISTENING}:1@{1 - asked}"]]))
    assert result.returncode != 0
    assert job.status["state"] == "resumable", result.stderr
    assert "stopped by SIGTERM before there was anything to save." in job.status["message"]
    assert "is gone" not in result.stderr


# Each rank holds signals back, and goes on to import what is slow.
IMPORTS = """
import os, runpy, signal, sys, time
import indictune.before_imports
if sys.argv.pop(1) == os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"]:
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed_while_it_imported(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    (tmp_path / "imports.py").write_text(IMPORTS, encoding="utf-8")
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), "--max_steps", "2"]
    flags += ["--resume_from_checkpoint", "auto"]
    command = [*torchrun(2), "--max-restarts", "1", str(tmp_path / "imports.py"), "10", SCRIPT, *flags]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "indictune: rank 1 is gone" in result.stderr
    assert (tmp_path / "out" / "metrics.json").exists()
