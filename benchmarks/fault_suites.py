"""The rows of the scoreboard that are files: our test suites, and the same files given to the stock stack."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.fault_rows import Found
from benchmarks.fault_runs import ONE, ZERO2, Contender, Job, ended, weights
from tests.distributed.launching import BIN, ROOT, accelerate, python, start, torchrun
from tests.faults.canaries import Canary
from tests.faults.test_tokens import TOKEN

# What pytest is told: files, and of those that hold more than is refused, tests.
SUITES = {
    "11": (
        "tests/test_bad_input.py",
        "tests/test_bad_chats.py",
        "tests/strategy/test_deepspeed.py::test_a_contradiction_names_both_values",
        "tests/strategy/test_check.py::test_another_strategy_than_was_asked_for_is_refused",
        "tests/strategy/test_launch.py::test_several_processes_asked_for_and_one_started_is_refused",
    ),
    "12": ("tests/faults/test_bad_data.py",),
    "14": ("tests/faults/test_canaries.py",),
    "15": ("tests/faults/test_tokens.py",),
    "16": ("tests/faults/test_hostile_names.py",),
}


# As transformers' Trainer reads the shards of FSDP2, by way of accelerate.
READ_SHARDS = (
    "import sys; from torch.distributed.checkpoint import FileSystemReader as R; R(sys.argv[1]).read_metadata()"
)


def suite(row: str, work: Path) -> Found:
    """Run the tests of a row; how many passed."""
    report = work / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *SUITES[row]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if not report.exists():
        raise RuntimeError(f"{' '.join(SUITES[row])}: {done.stderr[-1000:]}")
    found = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {each.tag for each in case} & {"failure", "error", "skipped"}
        found[min(outcomes) if outcomes else "passed"] += 1
    return {"test cases": dict(found)}


def _on_a_cpu(*flags: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2", *flags]


# What starts it, and flags.
WRONG_LAUNCHES: dict[str, tuple[Callable[[], list[str]], tuple[str, ...]]] = {
    "FSDP by flag": (python, ("--fsdp", "full_shard")),
    "FSDP by flag, torchrun, two": (partial(torchrun, 2), ("--fsdp", "full_shard")),
    "FSDP by accelerate's flag, two": (partial(_on_a_cpu, "--use_fsdp", "--fsdp_version", "2"), ()),
    "FSDP by accelerate's config, two": (partial(accelerate, "fsdp2", 2), ()),
    "two processes by accelerate's flag": (_on_a_cpu, ()),
    "two processes by flags that know of a CPU": (partial(_on_a_cpu, "--multi_gpu"), ()),
    "a strategy that is none": (python, ("--fsdp", "nosuch")),
    "bf16 and fp16": (python, ("--bf16", "true", "--fp16", "true")),
    "a flag cut short": (python, ("--weight_deca", "0.1")),
    "a flag that is none": (python, ("--nosuch", "1")),
}


def stock_launches(contender: Contender, work: Path) -> Found:
    """11: FSDP and processes asked for on a CPU, and flags that contradict or are none: what came up."""
    found: Found = {}
    for number, (title, (launcher, flags)) in enumerate(WRONG_LAUNCHES.items()):
        job = Job(replace(contender, launches={ONE: launcher}), work)
        code, said = job.run(work / f"launch-{number}", None, *flags)
        came_up = Counter(re.findall(r"trained as .* process\(es\)", said))
        errors = [line for line in said.splitlines() if re.match(r"(\w+: error: |[\w.]*Error: )", line)]
        ended_by = f"ended by {errors[0][:100] if errors else code}"
        found[title] = dict(came_up) or {ended_by: 1}
    return found


def stock_data(work: Path) -> Found:
    """12: the files of our suite, read by `datasets.load_dataset`."""
    done = start([*python(), "benchmarks/stock_loading.py", str(work)])
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1000:])
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def stock_canaries(contender: Contender, work: Path) -> Found:
    """14: a payload in place of each file of the checkpoint that is gone on from, and of DCP's metadata."""
    zero = replace(contender, launches={ZERO2: partial(accelerate, "zero2", 2)})
    metadata = Canary(work / "metadata-ran")
    metadata.saved(work / "shards" / ".metadata")
    subprocess.run([sys.executable, "-c", READ_SHARDS, str(work / "shards")], capture_output=True, check=False)
    return {
        "files of a checkpoint": _canaries(Job(contender, work)),
        "files of a checkpoint, ZeRO-2 x2": _canaries(Job(zero, work, ZERO2)),
        "metadata of FSDP2's shards": {"ran" if metadata.ran.exists() else "did not run": 1},
    }


def _canaries(job: Job) -> dict[str, int]:
    found, saved = Counter[str](), job.unbroken[0] / "checkpoint-4"
    for path in sorted(each for each in saved.rglob("*") if each.is_file()):
        name = str(path.relative_to(saved))
        folder = job.stopped_at(4, job.work / f"canary-{job.launch}-{name.replace('/', '-')}")
        canary = Canary(job.work / f"{folder.name}-ran")
        canary.saved(folder / "checkpoint-4" / name)
        job.run(folder)
        found["ran"] += canary.ran.exists()
        found["went on in silence" if ended(folder) else "did not go on"] += 1
    return dict(+found)


def stock_tokens(contender: Contender, work: Path) -> Found:
    """15: a token by flag; the files that hold it."""
    job, folder = Job(contender, work), work / "token"
    code, said = job.run(folder, None, "--hub_token", TOKEN)
    if code != 0:
        raise RuntimeError(said[-1000:])
    files = [path for path in folder.rglob("*") if path.is_file()]
    holding = [path for path in files if TOKEN.encode() in path.read_bytes()]
    return {"by flag": {"files that hold it": len(holding), "files": len(files)}}


def stock_names(contender: Contender, work: Path) -> Found:
    """16: the models and datasets of our suite; and a checkpoint whose state names a best one outside of the run."""
    done = start([*python(), "benchmarks/stock_names.py", str(work)])
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1000:])
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "state of a checkpoint": {_best_outside(Job(contender, work)): 1}}


def _best_outside(job: Job) -> str:
    folder = job.stopped_at(4, job.work / "best")
    outside = shutil.copytree(job.unbroken[0] / "checkpoint-2", job.work / "outside" / "checkpoint-2")
    path = folder / "checkpoint-4" / "trainer_state.json"
    best = {"best_model_checkpoint": str(outside), "best_global_step": 2, "best_metric": 1e9}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | best), encoding="utf-8")
    judged = ("--metric_for_best_model", "loss", "--greater_is_better", "true", "--load_best_model_at_end", "true")
    job.run(folder, None, *judged, "--eval_strategy", "steps", "--eval_steps", "1")
    if not ended(folder):
        return "refused"
    return "read outside" if weights(folder) == weights(outside) else "not read"
