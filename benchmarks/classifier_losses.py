"""The loss of each step of the classifier, while it learns: ours, beside others on the same batches.

In a few dozen steps it would learn no labels that are drawn by lot: every other word of a row tells its label here.
The larger model learns nothing at the rate of the small one, and has its own. Batches have 64 rows. With the recipe's
512 the padded side would compute thirteen times as much, for its longest rows are longer then: by reckoning, more than
the part's share of the time has room for beside its four starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from transformers.utils.import_utils import is_torch_tf32_available

from benchmarks.classifier_gpu import LABELS, SIZES, SPECIAL, job_of
from benchmarks.contenders import BATCH_SIZE, Contender, compete
from benchmarks.curves import TurnsWithAttention, compare_curves, show
from benchmarks.parts import Note, Plan
from benchmarks.speed import FP32, ROWS_OF_CURVE, STEPS_OF_CURVE, Row, write_rows

OURS = {"curve_of_ours": {"bf16": "false", "tf32": "false"}, "curve_of_ours_bf16": {"bf16": "true"}}
TRAINER = {
    "curve_of_trainer": {"tf32": False},
    "curve_of_trainer_bf16": {"bf16": True, "tf32": is_torch_tf32_available()},
}


def compare_with_trainer(plan: Plan, note: Note) -> None:
    """A part: ours without dropout, and the padded Trainer."""
    others = [Contender(title, "longest", settings) for title, settings in TRAINER.items()]
    _compare("losses", "trainer", others, plan, note)


def compare_with_compiled(plan: Plan, note: Note) -> None:
    """A part: ours without dropout, and ours compiled, twice: in fp32 and in bf16."""
    compiled = {"torch_compile": "true", "torch_compile_backend": SIZES[plan.size].compiler}
    others = [Contender(f"{title}_compiled", settings={**settings, **compiled}) for title, settings in OURS.items()]
    _compare("compiled_losses", "compiled", others, plan, note)


def _compare(name: str, upstream: str, others: Sequence[Contender], plan: Plan, note: Note) -> None:
    """Compare with `others`, in fp32 and in bf16, on a few rows that are seen again and again."""
    job = job_of(plan, name, STEPS_OF_CURVE)
    rows = [json.loads(line) for line in job.train_file.read_text(encoding="utf-8").splitlines()[:ROWS_OF_CURVE]]
    own_file = write_rows([telling_its_label(row) for row in rows], job.folder / "train.jsonl")
    job = replace(job, train_file=own_file, steps_per_lap=STEPS_OF_CURVE, warm_up_steps=0)
    common = {**FP32, "learning_rate": SIZES[plan.size].rate_of_curve}
    note({"rows": len(rows), "global_batch_size": BATCH_SIZE, "learning_rate": common["learning_rate"]})
    ours = [Contender(title, settings=settings) for title, settings in OURS.items()]
    pairs = [
        (replace(own, settings=common | own.settings), replace(other, settings=common | other.settings))
        for own, other in zip(ours, others, strict=True)
    ]
    found = compare_curves(upstream, pairs, job, partial(compete, turns=TurnsWithAttention), note)
    show(found, "classifier", upstream)


def telling_its_label(row: Row) -> Row:
    """A row of as many words, of which every other one is that of its label."""
    words = row["text"].split()
    words[::2] = [f"w{len(SPECIAL) + LABELS.index(row['label'])}"] * len(words[::2])
    return {**row, "text": " ".join(words)}
