"""Every task gives the same run under every family of strategies."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.conftest import starter
from tests.ranks.launching import Run
from tests.ranks.test_parity import differences

JOB = """
model_name_or_path: builtin:tiny-indic-bert
dropout: 0
max_length: 48
global_batch_size: 24
per_device_train_batch_size: 6
per_device_eval_batch_size: 8
max_steps: 7
learning_rate: 1e-3
lr_scheduler_type: constant_with_warmup
warmup_steps: 1
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: steps
save_steps: 1
save_total_limit: 20
"""

ENTITIES = {"B-PER": ["राम", "Sita", "கண்ணன்", "Priya"], "B-LOC": ["दिल्ली", "Chennai", "మధుర", "Hyderabad"]}


def sentences(rows: int, seed: int) -> str:
    """CoNLL: a person goes to a place, in 3 to 7 words."""
    rng, found = random.Random(seed), []
    for _ in range(rows):
        person, place = (rng.choice(words) for words in ENTITIES.values())
        filler = [f"{word} O" for word in rng.sample(["went", "to", "the", "big", "city"], rng.randint(1, 5))]
        found.append([f"{person} B-PER", *filler, f"{place} B-LOC"])
    return "\n\n".join("\n".join(sentence) for sentence in found) + "\n"


def write_tokens(folder: Path) -> str:
    for name, rows in (("train", 101), ("validation", 53)):
        (folder / f"{name}.conll").write_text(sentences(rows, rows), encoding="utf-8")
    return "".join(f"{name}_file: {json.dumps(str(folder / f'{name}.conll'))}\n" for name in ("train", "validation"))


TASKS: dict[str, tuple[str, Callable[[Path], str]]] = {"tokens": ("scripts/train_tokens.py", write_tokens)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Run]]:
    found = {}
    for name, (script, write) in TASKS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "job.yaml").write_text(JOB + write(folder), encoding="utf-8")
        found[name] = starter(folder / "job.yaml", tmp_path_factory, script)
    return found


@pytest.mark.parametrize(("name", "strategy"), list(itertools.product(TASKS, ("ddp", "fsdp2", "zero3"))))
def test_two_ranks_train_the_model_of_one_process(
    runs: dict[str, Callable[..., Run]], name: str, strategy: str
) -> None:
    one, two = runs[name]("single", 1, "--per_device_train_batch_size", "24"), runs[name](strategy, 2)
    assert len(one.log) == 7
    assert one.log[-1]["loss"] < one.log[0]["loss"]
    assert (two.metrics["strategy"], two.metrics["world_size"]) == (strategy, 2)
    assert differences(one, two) == []
    assert two.metrics["eval"]["per_language"] == one.metrics["eval"]["per_language"]
