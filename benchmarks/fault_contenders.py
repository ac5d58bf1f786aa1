"""The two columns of the fault scoreboard: our training script and a careful script on the stock Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.runs import EVALUATION, SAVE, STEP
from tests.ranks.launching import ROOT, SCRIPT, accelerate, python, torchrun

SAMPLES = ROOT / "indictune/data/samples"
STEPS, EPOCHS = 8, 2
MANY_STEPS, MANY_EPOCHS = 20, 5
GLOBAL_BATCH = 8
TRAIN_ROWS, VALIDATION_ROWS = 32, 16
CHATS = 50  # packs of 128 tokens: four global batches
ONE, DDP, FSDP2 = "one process", "DDP x2", "FSDP2 x2"
ZERO2, ZERO3, ZERO3_OFFLOAD = "ZeRO-2 x2", "ZeRO-3 x2", "ZeRO-3 with offload x2"

COMMON = ("--save_strategy", "steps", "--save_total_limit", "20", "--learning_rate", "1e-4", "--logging_steps", "1")
OURS = (
    *("--global_batch_size", str(GLOBAL_BATCH), "--resume_from_checkpoint", "auto"),
    *("--load_best_model_at_end", "false"),
)
WORKERS = ("--dataloader_num_workers", "2")
EACH_STEP = ("--save_steps", "1", "--eval_strategy", "no")
TWO_EPOCHS = ("--num_train_epochs", str(EPOCHS), *EACH_STEP)
MANY = ("--num_train_epochs", str(MANY_EPOCHS), *EACH_STEP)
KINDS = {
    "plain": TWO_EPOCHS,
    "plain, workers 2": (*TWO_EPOCHS, *WORKERS),
    # The stock Trainer saves 3 seconds after a SIGTERM; a run of 8 steps has ended by then.
    "long": ("--num_train_epochs", "75", "--save_steps", "20", "--eval_strategy", "steps", "--eval_steps", "20"),
    "many steps": MANY,
    "many steps, no dropout": (*MANY, "--dropout", "0"),
    "many rows": ("--num_train_epochs", "1", *EACH_STEP),
}


@dataclass(frozen=True)
class Contender:
    """A script that the scoreboard starts, stops and starts again.

    Attributes:
        title: of its column.
        command: script and flags of all runs.
        launches: launch name -> command that starts the script.
        flags: kind of run -> further flags.
        places: what a function does -> its import path, where faults are injected.
        packed: script and flags of a run on packed chats; empty if it has none.
        policies: values of its flag for non-finite numbers, the default first; empty if it has no such flag.
        unsupported: launch name -> why this contender cannot run it.
    """

    title: str
    command: tuple[str, ...]
    launches: Mapping[str, Callable[[], list[str]]]
    flags: Mapping[str, tuple[str, ...]]
    places: Mapping[str, str]
    packed: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)


def contenders(work: Path) -> tuple[Contender, Contender]:
    """Write the rows into a folder; return our script and the stock Trainer's on these rows."""
    lines = (SAMPLES / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    train, validation = work / "train.jsonl", work / "validation.jsonl"
    train.write_text("".join(lines[:TRAIN_ROWS]), encoding="utf-8")
    validation.write_text("".join(lines[TRAIN_ROWS : TRAIN_ROWS + VALIDATION_ROWS]), encoding="utf-8")
    files = ("--train_file", str(train), "--validation_file", str(validation))
    return _ours((*files, *COMMON), _packed(work)), _stock((*files, *COMMON))


def _with_workers(name: str, *flags: str) -> dict[str, tuple[str, ...]]:
    """A kind of batches without and with loader workers."""
    return {name: (*TWO_EPOCHS, *flags), f"{name}, workers 2": (*TWO_EPOCHS, *WORKERS, *flags)}


def _ours(shared: tuple[str, ...], packed: tuple[str, ...]) -> Contender:
    strategies = {DDP: "ddp", FSDP2: "fsdp2", ZERO2: "zero2", ZERO3_OFFLOAD: "zero3_offload", ZERO3: "zero3"}
    model = ("--model_name_or_path", "builtin:tiny-indic-bert", "--max_length", "32")
    return Contender(
        "ours",
        (SCRIPT, *model, *shared, *OURS),
        {ONE: python, **{name: partial(accelerate, strategy, 2) for name, strategy in strategies.items()}},
        {
            **KINDS,
            **_with_workers("accumulation"),
            **_with_workers("batches by length", "--max_tokens_per_device", "100"),
            "packed rows": (),
            "packed rows, workers 2": WORKERS,
            "many steps, skip": (*MANY, "--on_nonfinite", "skip", "--max_nonfinite_steps", "1"),
            "many steps, rollback": (*MANY, "--on_nonfinite", "rollback"),
        },
        {
            "after a step": STEP,
            "in a step": "transformers.trainer:Trainer.training_step",
            "in evaluation": EVALUATION,
            "in saving": SAVE,
            "in data preparation": "indictune.data.text.tokenisation:tokenised",
            "loss": "indictune.tasks.loss:ExactLoss.__call__",
            "gradients": "indictune.training.exact_trainer:ExactTrainer.training_step",
        },
        packed,
        ("stop", "skip", "rollback"),
    )


def _packed(work: Path) -> tuple[str, ...]:
    """Write a few chats; return the command that trains on their packs."""
    lines = (SAMPLES / "chats/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (work / "chats.jsonl").write_text("".join(lines[:CHATS]), encoding="utf-8")
    files = ("--train_file", str(work / "chats.jsonl"), "--validation_file", str(SAMPLES / "chats/validation.jsonl"))
    return (
        *("scripts/train_llama.py", "--model_name_or_path", "builtin:tiny-indic-llama", "--method", "full", *files),
        *("--packing", "true", "--max_length", "128", "--bf16", "false", *COMMON, *OURS, *TWO_EPOCHS),
    )


def _stock(shared: tuple[str, ...]) -> Contender:
    strategies = {ZERO2: "zero2", ZERO3_OFFLOAD: "zero3_offload", ZERO3: "zero3"}
    flags = ("--enable_jit_checkpoint", "true", "--use_cpu", "true", "--report_to", "none")
    return Contender(
        "stock Trainer",
        ("benchmarks/stock_trainer.py", *shared, *flags),
        {
            ONE: python,
            DDP: partial(torchrun, 2),
            **{name: partial(accelerate, strategy, 2) for name, strategy in strategies.items()},
        },
        {
            **KINDS,
            "many rows": (*KINDS["many rows"], "--keep_tokens", "true"),
            **_with_workers("accumulation", "--gradient_accumulation_steps", "2"),
            **_with_workers("batches by length", "--train_sampling_strategy", "group_by_length"),
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
        unsupported={FSDP2: "not run: on a CPU it ends with a NotImplementedError"},
    )
