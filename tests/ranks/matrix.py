"""What the method matrix tries: small jobs of some tasks, by flags, on some ranks of every strategy file."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from contextlib import chdir, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_recipe
from indictune.models import builtin
from indictune.models.adapters import config_file
from indictune.models.load import load_tokenizer, load_trained
from indictune.prediction.labelled_rows import label_texts
from indictune.preflight.checks import preflight
from indictune.preflight.derive import make_plan
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.kto import RatedAnswers
from indictune.tasks.preferences import Preference
from indictune.tasks.protocol import Task
from tests.launch_environment import launched
from tests.ranks import conftest, test_llama, test_tasks
from tests.ranks.launching import ROOT, SCRIPT
from tests.ranks.test_parity import PLAIN

Flags = tuple[str, ...]

FILES = sorted(file.stem for file in (ROOT / "accelerate_configs").iterdir())
STEPS = 7  # of a classifier and of pairs 5 are an epoch, of LLaMA 4, of LLaMA with packing 3
ON_EIGHT, ON_FOUR = ("3d",), ("ddp_tp", "fsdp2_cp", "fsdp2_tp", "hsdp", "zero1_tp", "zero2_tp")


class Feature(NamedTuple):
    """Flags of a run that has a feature, and what its log says of it."""

    flags: Flags
    logged: str = ""


class Kind(NamedTuple):
    """A task of the matrix.

    Attributes:
        task: whose plan says what is refused.
        script: that trains it.
        write_job: writes its rows and recipe, and gives the recipe.
        methods: flags of each method.
        one: flags of the run of one process that a method is compared with.
        features: which a run of all weights can have all at once.
        one_with_features: flags of the run of one process that such a run is compared with.
        stopped_at: a step in the second epoch, from which that run is resumed.
        loss_read_anew: of a saved model on the file of validation rows, read by this process.
        measures_first: whether a run measures the model before training, which is kept in the cache.
    """

    task: Task[Any, Any, Any]
    script: str
    write_job: Callable[[Path], Path]
    methods: dict[str, Flags]
    one: dict[str, Flags]
    features: dict[str, Feature]
    one_with_features: Flags
    stopped_at: int
    loss_read_anew: Callable[[Path, Path], float]
    measures_first: bool = False


METHODS = {"full": "full", "LoRA": "lora", "QLoRA": "qlora"}
BF16 = ("--bf16", "true")
IN_ANY_RUN = ("resume", "exact evaluation", "verified save")  # columns that need no flag
_CHECKPOINTING = Feature(("--gradient_checkpointing", "true"))
_IGNORED = "Ignoring --per_device_train_batch_size"

_AT_ONCE = ("--per_device_train_batch_size", "24")


def loss_of_classifier(folder: Path, validation: Path) -> float:
    rows = [json.loads(line) for line in validation.read_text(encoding="utf-8").splitlines()]
    answers = label_texts(folder, [row["text"] for row in rows])
    losses = [-math.log(each["scores"][row["label"]]) for row, each in zip(rows, answers, strict=True)]
    return math.fsum(losses) / len(losses)


def write_pairs_job(folder: Path, marked: bool = False) -> Path:
    """A recipe: 101 pairs of answers make 5 global batches of 24 an epoch, the last of them with 5 pairs."""
    recipe = folder / "job.yaml"
    recipe.write_text(test_tasks.JOB + test_tasks.write_answer_pairs(folder, marked, more=""), encoding="utf-8")
    return recipe


@torch.no_grad()
def gained(folder: Path, answers: Iterable[tuple[str, str]]) -> list[float]:
    """How much more likely each answer to a prompt has become by a training, in nats. Each is read alone.

    The model before training is the base without its adapter, or the built-in model.
    """
    tokenizer, is_adapter = load_tokenizer(ModelArguments(str(folder))), config_file(folder).name != "config.json"
    first = builtin.resolve("builtin:tiny-indic-llama")
    model = load_trained(folder, kind=AutoModelForCausalLM, dtype=torch.float32).eval()
    frozen: Any = None if is_adapter else AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)

    def log_prob(of: Any, prompt: str, answer: str) -> float:
        start, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + answer))
        ids = torch.tensor([[tokenizer.bos_token_id, *whole, tokenizer.eos_token_id]])
        found = -functional.cross_entropy(of(input_ids=ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
        return float(found[len(start) :].sum())

    found = []
    for each in answers:
        after = log_prob(model, *each)
        with model.disable_adapter() if is_adapter else nullcontext():
            found.append(after - log_prob(frozen or model, *each))
    return found


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def loss_of_pairs(folder: Path, validation: Path) -> float:
    """Of DPO, with its default beta."""
    sides = (
        gained(folder, [(row["prompt"], row[side]) for row in _rows(validation)]) for side in ("chosen", "rejected")
    )
    losses = [math.log1p(math.exp(-0.1 * (better - worse))) for better, worse in zip(*sides, strict=True)]
    return math.fsum(losses) / len(losses)


def loss_of_marked(folder: Path, validation: Path) -> float:
    """Of KTO, with its default beta. Each prompt also has the answer of the row before; the first, of the second."""
    rows = _rows(validation)
    others = [rows[1], *rows[:-1]]
    assert all(row["prompt"] != other["prompt"] for row, other in zip(rows, others, strict=True))
    own = gained(folder, [(row["prompt"], row["completion"]) for row in rows])
    mixed = gained(folder, [(row["prompt"], other["completion"]) for row, other in zip(rows, others, strict=True)])
    divergence = max(0.0, math.fsum(mixed) / len(mixed))
    signs = [1 if row["label"] else -1 for row in rows]
    losses = [1 - 1 / (1 + math.exp(-0.1 * sign * (gain - divergence))) for sign, gain in zip(signs, own, strict=True)]
    return math.fsum(losses) / len(losses)


def _of_answers(task: Preference, loss: Callable[[Path, Path], float], most_tokens: int, marked: bool) -> Kind:
    return Kind(
        task,
        test_tasks.TASKS[task.name][0],
        partial(write_pairs_job, marked=marked),
        {name: test_llama.METHODS[method] for name, method in METHODS.items()},
        {"full": _AT_ONCE, "LoRA": _AT_ONCE, "QLoRA": ()},
        {
            "activation checkpointing": _CHECKPOINTING,
            "limit of tokens": Feature(("--max_tokens_per_device", str(most_tokens)), _IGNORED),
        },
        _AT_ONCE,
        stopped_at=6,
        loss_read_anew=loss,
        measures_first=True,
    )


KINDS = {
    "classifier": Kind(
        Classification(),
        SCRIPT,
        conftest.write_job,
        {name: ("--method", method) for name, method in METHODS.items()},
        {"full": PLAIN, "LoRA": PLAIN, "QLoRA": ()},
        {
            "active vocabulary": Feature(("--active_vocabulary", "on"), "of 5,000 embedding rows are trained"),
            "activation checkpointing": _CHECKPOINTING,
            "limit of tokens": Feature(("--max_tokens_per_device", "60"), _IGNORED),
        },
        PLAIN,
        stopped_at=6,
        loss_read_anew=loss_of_classifier,
    ),
    "LLaMA": Kind(
        Chat(),
        test_llama.SCRIPT,
        test_llama.write_job,
        {name: test_llama.METHODS[method] for name, method in METHODS.items()},
        {name: test_llama.ONE_PROCESS[method] for name, method in METHODS.items()},
        {
            "packing": Feature(("--packing", "true")),
            "activation checkpointing": _CHECKPOINTING,
            "limit of tokens": Feature(("--max_tokens_per_device", "140"), _IGNORED),
        },
        (*test_llama.MICRO_BATCH_OF_12, "--packing", "true", "--gradient_checkpointing", "false"),
        stopped_at=5,
        loss_read_anew=test_llama.loss_read_anew,
    ),
    "DPO": _of_answers(Preference(), loss_of_pairs, most_tokens=400, marked=False),
    "KTO": _of_answers(RatedAnswers(), loss_of_marked, most_tokens=200, marked=True),
}


def columns_of(kind: str) -> dict[str, Flags]:
    """The columns of a task: methods, and features of runs that train all weights, with their flags."""
    job = KINDS[kind]
    full = job.methods["full"]
    features = {name: (*full, *feature.flags) for name, feature in job.features.items()}
    return {**job.methods, **features, "bf16": (*full, *BF16), **dict.fromkeys(IN_ANY_RUN, full)}


def refusals(file: str, kind: str, recipe: Path) -> dict[str, str | None]:
    """The code by which each column is refused under a file; None where it can run."""
    columns, job = columns_of(kind), KINDS[kind]
    at_once = (*job.methods["full"], *BF16, *(flag for feature in job.features.values() for flag in feature.flags))
    asked = columns if refusal(file, kind, recipe, *at_once) else {name: columns[name] for name in METHODS}
    codes = {flags: refusal(file, kind, recipe, *flags) for flags in asked.values()}
    return {name: codes.get(flags) for name, flags in columns.items()}


def ranks_of(file: str) -> int:
    """The fewest ranks on which a file uses all of its axes."""
    if file == "single_gpu":
        return 1
    return 8 if file in ON_EIGHT else 4 if file in ON_FOUR else 2


def launched_file(file: str, folder: Path) -> str | Path:
    """A shipped file for `accelerate`. Here one machine stands for two nodes of HSDP."""
    if file != "hsdp":
        return file
    text = (ROOT / "accelerate_configs/hsdp.yaml").read_text(encoding="utf-8")
    copy = folder / "hsdp.yaml"
    copy.write_text(text.replace("replicate_size: -1", "replicate_size: 2"), encoding="utf-8")
    return copy


def refusal(file: str, kind: str, recipe: Path, *flags: str) -> str | None:
    """The code of the first reason not to start a run under a file; None if there is none."""
    task = KINDS[kind].task
    argv = ["--config", str(recipe), "--output_dir", str(recipe.parent / "none"), *flags]
    with chdir(ROOT):
        plan, problems = make_plan(read_recipe(argv, task.arguments), _environment(file), task)
        found = [*problems, *preflight(plan, task)]
    return found[0].code if found else None


@functools.cache
def _environment(file: str) -> dict[str, str]:
    ranks = ranks_of(file)
    environ = launched(ROOT / f"accelerate_configs/{file}.yaml", ranks)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // 2 if file == "hsdp" else ranks)}
    return environ if ranks == 1 else environ | sizes
