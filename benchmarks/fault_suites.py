"""The rows of the scoreboard that are files and flags: our tests, and what is given to ours and to the stock stack."""

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
from typing import Any
from xml.etree import ElementTree

from benchmarks.fault_cases import SUITES, case_of
from benchmarks.fault_rows import Found, names_the_file
from benchmarks.fault_runs import DDP, ONE, ZERO2, Contender, Job, ended, status_of, weights
from tests.faults.canaries import Canary
from tests.faults.test_tokens import TOKEN
from tests.ranks.launching import BIN, ROOT, accelerate, python, start, torchrun

# As transformers' Trainer reads the shards of FSDP2, by way of accelerate.
READ_SHARDS = (
    "import sys; from torch.distributed.checkpoint import FileSystemReader as R; R(sys.argv[1]).read_metadata()"
)


def suite(row: str, work: Path) -> Found:
    """Run the tests of a row; how many of each case passed.

    Raises:
        RuntimeError: a test is not there, or pytest could not run.
    """
    report = work / "report.xml"
    chosen = [each for tests in SUITES[row].values() for each in tests]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1:  # 1: one has failed
        raise RuntimeError(f"{' '.join(chosen)}: {(done.stdout + done.stderr)[-1000:]}")
    found = {title: Counter[str]() for title in SUITES[row]}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {each.tag for each in case} & {"failure", "error", "skipped"}
        title = case_of(row, f"{case.get('classname')}.{case.get('name')}")
        found[title][min(outcomes) if outcomes else "passed"] += 1
    return {title: dict(counts) for title, counts in found.items()}


def _on_a_cpu(*flags: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2", *flags]


# The processes that were asked for, what starts it, and flags.
WRONG_LAUNCHES: dict[str, tuple[str, Callable[[], list[str]], tuple[str, ...]]] = {
    "FSDP by flag": (ONE, python, ("--fsdp", "full_shard")),
    "FSDP by flag, torchrun, two": (DDP, partial(torchrun, 2), ("--fsdp", "full_shard")),
    "FSDP by accelerate's flag, two": (DDP, partial(_on_a_cpu, "--use_fsdp", "--fsdp_version", "2"), ()),
    "FSDP by accelerate's config, two": (DDP, partial(accelerate, "fsdp2", 2), ()),
    "two processes by accelerate's flag": (DDP, _on_a_cpu, ()),
    "two processes by flags that know of a CPU": (DDP, partial(_on_a_cpu, "--multi_gpu"), ()),
    "a strategy that is none": (ONE, python, ("--fsdp", "nosuch")),
    "bf16 and fp16": (ONE, python, ("--bf16", "true", "--fp16", "true")),
    "a flag cut short": (ONE, python, ("--weight_deca", "0.1")),
    "a flag that is none": (ONE, python, ("--nosuch", "1")),
}


def wrong_launches(contender: Contender, work: Path) -> Found:
    """11: FSDP and processes asked for on a CPU, and flags that contradict or are none: what came up."""
    found: Found = {}
    for number, (title, (launch, launcher, flags)) in enumerate(WRONG_LAUNCHES.items()):
        job, folder = Job(replace(contender, launches={launch: launcher}), work, launch), work / f"launch-{number}"
        code, said = job.run(folder, None, *flags)
        found[title] = {what_came_up(folder, code, said): 1}
    return found


def what_came_up(folder: Path, code: int | None, said: str) -> str:
    """As what a run that gave 0 says that it has trained; of another the message, or the first error."""
    up = re.search(r"\b\w+ on \d+ process\(es\)", said)
    if code == 0 and up:
        return f"trained as {up[0]}"
    errors = re.findall(r"^(?:\[rank\d+\]: )?((?:[\w.]+: error: |[\w.]*Error: ).*)", said, re.MULTILINE)
    told = status_of(folder)[1] or (errors[0] if errors else str(code))
    return f"ended by {' '.join(told.split())[:100]}"


def stock_data(work: Path) -> Found:
    """12: the files of our suite, read by `datasets.load_dataset`."""
    done = start([*python(), "benchmarks/stock_loading.py", str(work)])
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1000:])
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


# Rows after those of labels 0, 1 and 2, which validation has: the training rows, or those that are evaluated.
STRANGE_LABELS: dict[str, tuple[str, object]] = {
    "3 in training": ("train", 3),
    "-1 in training": ("train", -1),
    "-100 in training": ("train", -100),
    "-1 in validation": ("validation", -1),
    "a name in training": ("train", "none"),
}
NEW_TOKEN = "क्रिकेटर"


def stock_strangers(contender: Contender, work: Path) -> Found:
    """12: labels that are none of the run's, as ids where they are numbers, and a token that the model has not."""
    found: dict[str, Counter[str]] = {"labels that are none of the run's": Counter()}
    for title, (split, label) in STRANGE_LABELS.items():
        known = ["a", "b", "c"] if isinstance(label, str) else [0, 1, 2]
        outcome = _strange(contender, work / title.replace(" ", "-"), split, {"text": "x", "label": label}, known)
        found["labels that are none of the run's"][outcome] += 1
    row, flags = {"text": NEW_TOKEN, "label": 0}, ("--new_token", NEW_TOKEN)
    outcome = _strange(contender, work / "token", "train", row, [0, 1, 2], *flags)
    return {**{title: dict(counts) for title, counts in found.items()}, "token ids beyond the embedding": {outcome: 1}}


def _strange(
    contender: Contender, work: Path, split: str, row: dict[str, object], labels: list[Any], *flags: str
) -> str:
    """How a run ends that has such a row at the end of a split, and whether it names the line."""
    work.mkdir()
    rows = [{"text": "x", "label": label} for label in labels * 4]
    for name in ("train", "validation"):
        lines = [*rows, row] if name == split else rows
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    words = [str(work / Path(word).name) if word.endswith(".jsonl") else word for word in contender.command]
    job = Job(replace(contender, command=tuple(words)), work)
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "1")
    code, said = job.run(work / "out", None, *evaluated, *flags)
    return judged_stranger(code, said, len(rows) + 1)


def judged_stranger(code: int | None, said: str, line: int) -> str:
    """In words: whether a run ended in silence, or with an error, and by which."""
    if code == 0:
        return "trained in silence"
    error = re.findall(r"^(\w*Error)\b", said, re.MULTILINE)
    named = "names the row" if re.search(rf"jsonl:{line}\b", said) else "names no row"
    return f"ended by {error[-1] if error else code}, which {named}"


def canaries(contender: Contender, work: Path) -> Found:
    """14: a payload in place of each file of the checkpoint that is gone on from."""
    zero = replace(contender, launches={ZERO2: partial(accelerate, "zero2", 2)})
    return {
        "files of a checkpoint": _canaries(Job(contender, work)),
        "files of a checkpoint, ZeRO-2 x2": _canaries(Job(zero, work, ZERO2)),
    }


def _canaries(job: Job) -> dict[str, int]:
    found, saved = Counter[str](), job.unbroken[0] / "checkpoint-4"
    for path in sorted(each for each in saved.rglob("*") if each.is_file()):
        name = str(path.relative_to(saved))
        folder = job.stopped_at(4, job.work / f"canary-{job.launch}-{name.replace('/', '-')}")
        canary = Canary(job.work / f"{folder.name}-ran")
        canary.saved(folder / "checkpoint-4" / name)
        _, said = job.run(folder)
        found["ran"] += canary.ran.exists()
        found[_gone_on(folder, said, folder / "checkpoint-4" / name)] += 1
    return dict(+found)


def _gone_on(folder: Path, said: str, path: Path) -> str:
    if not ended(folder):
        return "did not go on"
    return "named it and went on" if names_the_file(said, path) else "went on in silence"


def stock_metadata(work: Path) -> Found:
    """14: a payload in place of DCP's metadata."""
    metadata = Canary(work / "metadata-ran")
    metadata.saved(work / "shards" / ".metadata")
    subprocess.run([sys.executable, "-c", READ_SHARDS, str(work / "shards")], capture_output=True, check=False)
    return {"metadata of FSDP2's shards": {"ran" if metadata.ran.exists() else "did not run": 1}}


def tokens(contender: Contender, work: Path) -> Found:
    """15: a token by flag and by environment."""
    return {**token_by_flag(contender, work), **token_by_environment(contender, work)}


def token_by_flag(contender: Contender, work: Path) -> Found:
    """15: a run that is given a token by flag; the files that hold it."""
    job, folder = Job(contender, work), work / "token"
    code, said = job.run(folder, None, "--hub_token", TOKEN)
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        raise RuntimeError(said[-1000:])
    holding = [path for path in files if TOKEN.encode() in path.read_bytes()]
    ended_so = "trained" if code == 0 else "refused"
    return {"a run with --hub_token": {ended_so: 1, "files that hold it": len(holding), "files": len(files)}}


def token_by_environment(contender: Contender, work: Path) -> Found:
    """15: a run that finds a token in its environment; the files that hold it."""
    job, folder = Job(contender, work), work / "token-by-environment"
    code, said = job.run(folder, None, HF_TOKEN=TOKEN)
    if code != 0:
        raise RuntimeError(said[-1000:])
    files = [path for path in folder.rglob("*") if path.is_file()]
    holding = [path for path in files if TOKEN.encode() in path.read_bytes()]
    said_it = {"files that hold it": len(holding), "files": len(files), "told": int(TOKEN in said)}
    return {"a run with HF_TOKEN": {"trained": 1, **said_it}}


def stock_names(work: Path) -> Found:
    """16: the models and datasets of our suite."""
    done = start([*python(), "benchmarks/stock_names.py", str(work)])
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1000:])
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def best_outside(contender: Contender, work: Path) -> Found:
    """16: a checkpoint whose state names a best one outside of the run."""
    job = Job(contender, work)
    folder = job.stopped_at(4, job.work / "best")
    outside = shutil.copytree(job.unbroken[0] / "checkpoint-2", job.work / "outside" / "checkpoint-2")
    path = folder / "checkpoint-4" / "trainer_state.json"
    best = {"best_model_checkpoint": str(outside), "best_global_step": 2, "best_metric": 1e9}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | best), encoding="utf-8")
    judged = ("--metric_for_best_model", "loss", "--greater_is_better", "true", "--load_best_model_at_end", "true")
    job.run(folder, None, *judged, "--eval_strategy", "steps", "--eval_steps", "1")
    if not ended(folder):
        return {"state of a checkpoint": {"refused": 1}}
    return {"state of a checkpoint": {"read outside" if weights(folder) == weights(outside) else "not read": 1}}
