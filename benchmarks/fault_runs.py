"""Runs that something happens to, ours and the stock Trainer's, started again until they end."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import psutil

from indictune.checkpoint import store
from tests.faults.runs import EVALUATION, FAULTY, FOLDER, SAVE, STEP, processes_of
from tests.ranks.launching import ROOT, SCRIPT, accelerate, python, start, torchrun

SAMPLES = ROOT / "indictune/data/samples/train.jsonl"
STEPS, MANY_STEPS = 8, 20  # in two epochs and in five
EPOCHS = 2
GLOBAL_BATCH = 8
TRAIN_ROWS, HELD_OUT_ROWS = 32, 16
CHATS = 50  # in packs of 128 places: four global batches
TRIES = 3
TIMEOUT_S = 180
EXIT_RESUMABLE = 75
JUDGED = ("exact", "exact but for its log", "did steps again", "wrong", "stuck")
LATER = "at a later start"  # said beside these of a run that had failed once more
ONE, DDP, FSDP2 = "one process", "DDP x2", "FSDP2 x2"
ZERO2, ZERO3, ZERO3_OFFLOAD = "ZeRO-2 x2", "ZeRO-3 x2", "ZeRO-3 with offload x2"

# Saved where --save_steps or an event tells, and logged at each step.
EACH_STEP = (
    *("--save_strategy", "steps", "--save_total_limit", "20", "--learning_rate", "1e-4", "--logging_steps", "1"),
)
OURS = (
    *("--global_batch_size", str(GLOBAL_BATCH), "--resume_from_checkpoint", "auto"),
    *("--load_best_model_at_end", "false"),
)
WORKERS = ("--dataloader_num_workers", "2")


@dataclass(frozen=True)
class Contender:
    """Who is started again and again.

    Attributes:
        title: of its column.
        command: script and flags of all runs.
        launches: what starts it, by name.
        flags: by the kind of run.
        places: functions that it calls, by what they do.
        packed: script and flags of a run of a language model on packed rows, where it has one.
        policies: what it can be told to do about a bad number, the first if it is told nothing; none where it has no
            such flag, and notes nothing.
        cannot: why it has not a launch that others have, by name.
    """

    title: str
    command: tuple[str, ...]
    launches: Mapping[str, Callable[[], list[str]]]
    flags: Mapping[str, tuple[str, ...]]
    places: Mapping[str, str]
    packed: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Runs of one contender, with one launch and one kind of flags.

    Attributes:
        contender: who runs.
        work: gets the folders of the runs.
        launch: a key of its `launches`.
        kind: a key of its `flags`; those that begin with "accumulation" split what a process reads in two.
    """

    contender: Contender
    work: Path
    launch: str = ONE
    kind: str = "plain"

    def words(self, folder: Path, *flags: str, event: str | None = None) -> list[str]:
        """The command; `event` as in `tests/faults/faulty.py`."""
        faulty = (FAULTY, event) if event else ()
        contender = self.contender
        rows = GLOBAL_BATCH // (1 if self.launch == ONE else 2) // (2 if self.kind.startswith("accumulation") else 1)
        return [
            *(*contender.launches[self.launch](), *faulty, *contender.command, *contender.flags[self.kind]),
            *("--per_device_train_batch_size", str(rows), *flags, "--output_dir", str(folder)),
        ]

    def run(
        self, folder: Path, event: str | None = None, *flags: str, timeout_s: int = TIMEOUT_S, **variables: str
    ) -> tuple[int | None, str]:
        """As `typed`, with an event or flags beside its own."""
        return self.typed(self.words(folder, *flags, event=event), folder, timeout_s, **variables)

    def typed(
        self, words: list[str], folder: Path, timeout_s: int = TIMEOUT_S, **variables: str
    ) -> tuple[int | None, str]:
        """Exit code of a command for a folder, and what it said; None where it hung and was killed."""
        try:
            done = start(words, {FOLDER: str(folder), **variables}, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            kill_processes_of(folder)
            return None, ""
        return done.returncode, done.stdout + done.stderr

    @cached_property
    def unbroken(self) -> tuple[Path, float]:
        """The run that nothing happens to, and how many seconds it took.

        Raises:
            RuntimeError: it failed.
        """
        folder, since = self.work / f"unbroken-{self.launch}-{self.kind}".replace(" ", "-"), time.monotonic()
        code, said = self.run(folder)
        if code != 0 or not ended(folder):
            raise RuntimeError(f"the run that nothing happened to failed: {said[-2000:]}")
        return folder, time.monotonic() - since

    def judged(self, folder: Path, code: int | None, said: str, newest: int) -> str:
        """`exact`: its last start gave 0, and it ended with the very weights of the run that nothing happened to, and
        with the loss and the learning rate of each of its steps, once; `exact but for its log`; `did steps again`:
        with those weights too, but it did not go on from the newest checkpoint; else `wrong`, or `stuck`.

        Args:
            folder: of the run.
            code: that its last start gave.
            said: by that start.
            newest: step of the newest checkpoint that was whole, at which it must go on.
        """
        if code != 0 or not ended(folder):
            return "stuck"
        if weights(folder) != weights(self.unbroken[0]):
            return "wrong"
        if gone_on_from(said, folder) < newest:
            return "did steps again"
        return "exact" if logged(folder) == logged(self.unbroken[0]) else "exact but for its log"

    def until_it_ends(self, folder: Path) -> Counter[str]:
        """Start it until a start gives 0, with nobody lending a hand; judged, and, where it took more than one, how
        each that failed had ended."""
        code, said, failed, newest = None, "", list[str](), 0
        while code != 0 and len(failed) < TRIES:
            newest = 0 if ended(folder) else max(newest, newest_whole(folder))  # it may save more, and lose none
            code, said = self.run(folder)
            if code != 0:
                failed.append(how_it_failed(code, said))
        found = Counter({self.judged(folder, code, said, newest): 1})
        if code == 0 and failed:
            found[LATER] = 1
            found.update(failed)
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def stopped_at(self, step: int, folder: Path) -> Path:
        """A folder as the unbroken run has left it after a step."""
        saved = store.listed(self.unbroken[0])
        later = [path.name for path in saved if store.step_of(path) > step]
        shutil.copytree(self.unbroken[0], folder, ignore=shutil.ignore_patterns(*later, "metrics.json", "status.json"))
        (folder / "model.safetensors").unlink()
        return folder


def how_it_failed(code: int | None, said: str) -> str:
    """Of a start that did not give 0: that it hung, or its exit code and last line."""
    if code is None:
        return f"a start hung, and was killed after {TIMEOUT_S} s"
    return f"a start gave {code}: {(said.strip().splitlines() or ['without a word'])[-1][:200]}"


def ended(folder: Path) -> bool:
    """Whether a run has saved its model; ours, which keeps a log, writes its metrics last."""
    names = ["model.safetensors", "metrics.json"] if (folder / "train_log.jsonl").exists() else ["model.safetensors"]
    return all((folder / name).exists() for name in names)


def newest_whole(folder: Path) -> int:
    """Step of the newest checkpoint that can be gone on from; 0 where there is none."""
    whole = (store.step_of(path) for path in store.listed(folder) if _is_whole(path))
    return max(whole, default=0)


def is_torn(folder: Path) -> bool:
    """Whether a folder has a checkpoint that cannot be gone on from."""
    return not all(map(_is_whole, store.listed(folder)))


def _is_whole(checkpoint: Path) -> bool:
    """By its manifest where it is ours; the stock Trainer writes no more than its state after all that it reads."""
    is_ours = (checkpoint.parent / "train_log.jsonl").exists()
    return not store.damage(checkpoint) if is_ours else (checkpoint / "trainer_state.json").exists()


def gone_on_from(said: str, folder: Path) -> int:
    """Step of the checkpoint of its folder that a run went on from, by what it said; the last, where its launcher
    started it again, and 0 where it started afresh."""
    steps = re.findall(rf"Going on from {re.escape(str(folder))}/{store.PREFIX}(\d+)\b", said)
    return int(steps[-1]) if steps else 0


def weights(folder: Path) -> str:
    """Digest of the saved model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def steps_lost(folder: Path) -> int:
    """Steps of our log that no whole checkpoint holds; 0 where there is no log."""
    log = folder / "train_log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    logged = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(logged) - newest_whole(folder) if logged else 0


def logged(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate as they were logged, from our log or the stock Trainer's last checkpoint."""
    log = folder / "train_log.jsonl"
    if log.exists():
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    else:
        state = store.listed(folder)[0] / "trainer_state.json"
        entries = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in entries if "loss" in entry]


def epochs(folder: Path) -> float:
    """How many a run has done, by its newest checkpoint."""
    state = store.listed(folder)[0] / "trainer_state.json"
    return float(json.loads(state.read_text(encoding="utf-8"))["epoch"])


def losses(folder: Path) -> list[float]:
    """Of each step."""
    return [loss for _, loss, _ in logged(folder)]


def status_of(folder: Path) -> tuple[str, str]:
    """State and message of our `status.json`; empty where there is none."""
    path = folder / "status.json"
    status = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"state": "", "message": ""}
    return status["state"], status["message"]


def tells_of_going_on(folder: Path, code: int | None, is_of_the_run: bool) -> bool:
    """Whether a stopped run has told that it can be gone on with: by its exit code, or by `status.json` where that is
    its launcher's."""
    return code == EXIT_RESUMABLE if is_of_the_run else status_of(folder)[0] == "resumable"


def kill_processes_of(folder: Path) -> None:
    """Those that have outlived their launcher."""
    for pid in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def contenders(work: Path) -> list[Contender]:
    """Ours and the stock Trainer, on the same rows, which are written into a folder."""
    lines = SAMPLES.read_text(encoding="utf-8").splitlines(keepends=True)
    files = {"train": lines[:TRAIN_ROWS], "validation": lines[TRAIN_ROWS : TRAIN_ROWS + HELD_OUT_ROWS]}
    for name, part in files.items():
        (work / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    shared = (
        *("--train_file", str(work / "train.jsonl"), "--validation_file", str(work / "validation.jsonl")),
        *EACH_STEP,
    )
    # The stock Trainer saves 3 seconds after a SIGTERM, and a run of 8 steps has ended by then.
    long = ("--num_train_epochs", "75", "--save_steps", "20", "--eval_strategy", "steps", "--eval_steps", "20")
    quiet = ("--save_steps", "1", "--eval_strategy", "no")
    plain, many = (("--num_train_epochs", str(number), *quiet) for number in (EPOCHS, 5))
    both = {
        "plain": plain,
        "plain, workers 2": (*plain, *WORKERS),
        "long": long,
        "many steps": many,
        "many steps, no dropout": (*many, "--dropout", "0"),
        "many rows": ("--num_train_epochs", "1", *quiet),
    }
    return [_ours(shared, both, _packed(work)), _stock(shared, both)]


def _of_two(kinds: dict[str, tuple[str, ...]], name: str, *flags: str) -> dict[str, tuple[str, ...]]:
    """A kind of batches, without workers and with."""
    return {name + kind.removeprefix("plain"): (*kinds[kind], *flags) for kind in ("plain", "plain, workers 2")}


def _ours(shared: tuple[str, ...], kinds: dict[str, tuple[str, ...]], packed: tuple[str, ...]) -> Contender:
    return Contender(
        "ours",
        (
            *(SCRIPT, "--model_name_or_path", "builtin:tiny-indic-bert", "--max_length", "32", *shared),
            *OURS,
        ),
        {
            ONE: python,
            DDP: partial(accelerate, "ddp", 2),
            FSDP2: partial(accelerate, "fsdp2", 2),
            ZERO2: partial(accelerate, "zero2", 2),
            ZERO3_OFFLOAD: partial(accelerate, "zero3_offload", 2),
            ZERO3: partial(accelerate, "zero3", 2),
        },
        {
            **kinds,
            **_of_two(kinds, "accumulation"),
            **_of_two(kinds, "batches by length", "--max_tokens_per_device", "100"),
            "packed rows": (),
            "packed rows, workers 2": WORKERS,
            "many steps, skip": (*kinds["many steps"], "--on_nonfinite", "skip", "--max_nonfinite_steps", "1"),
            "many steps, rollback": (*kinds["many steps"], "--on_nonfinite", "rollback"),
        },
        {
            "after a step": STEP,
            "in a step": "transformers.trainer:Trainer.training_step",
            "in evaluation": EVALUATION,
            "in saving": SAVE,
            "in data preparation": "indictune.data.tokenisation:_encoder",
            "loss": "indictune.train.loss:ExactLoss.__call__",
            "gradients": "indictune.train.exact_trainer:ExactTrainer.training_step",
        },
        packed,
        ("stop", "skip", "rollback"),
    )


def _packed(work: Path) -> tuple[str, ...]:
    """Few chats, which are written into a folder: the packs of all make more steps than two epochs may have."""
    chats = ROOT / "indictune/data/samples/chats"
    lines = (chats / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (work / "chats.jsonl").write_text("".join(lines[:CHATS]), encoding="utf-8")
    return (
        *("scripts/train_llama.py", "--model_name_or_path", "builtin:tiny-indic-llama", "--method", "full"),
        *("--train_file", str(work / "chats.jsonl"), "--validation_file", str(chats / "validation.jsonl")),
        *("--packing", "true", "--max_length", "128", "--bf16", "false", "--num_train_epochs", str(EPOCHS)),
        *(*EACH_STEP, *OURS, "--save_steps", "1", "--eval_strategy", "no"),
    )


def _stock(shared: tuple[str, ...], kinds: dict[str, tuple[str, ...]]) -> Contender:
    script = "benchmarks/stock_trainer.py"
    return Contender(
        "stock Trainer",
        (script, *shared, "--enable_jit_checkpoint", "true", "--use_cpu", "true", "--report_to", "none"),
        {
            ONE: python,
            DDP: partial(torchrun, 2),
            ZERO2: partial(accelerate, "zero2", 2),
            ZERO3_OFFLOAD: partial(accelerate, "zero3_offload", 2),
            ZERO3: partial(accelerate, "zero3", 2),
        },
        {
            **kinds,
            "many rows": (*kinds["many rows"], "--keep_tokens", "true"),
            **_of_two(kinds, "accumulation", "--gradient_accumulation_steps", "2"),
            **_of_two(kinds, "batches by length", "--train_sampling_strategy", "group_by_length"),
        },
        {
            "after a step": "transformers.trainer_callback:DefaultFlowCallback.on_step_end",
            "in a step": "transformers.trainer:Trainer.training_step",
            "in evaluation": "transformers.trainer:Trainer.prediction_step",
            "in saving": "transformers.trainer:Trainer._save_checkpoint",
            "in data preparation": "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
            "loss": "transformers.trainer:Trainer.compute_loss",
            "gradients": "transformers.trainer:Trainer.training_step",
        },
        cannot={FSDP2: "not run: on a CPU it ends by a NotImplementedError, as row 11 has it"},
    )
