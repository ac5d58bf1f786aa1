"""Bytes sent and kept by each process, and its idle time, next to the formulas: each strategy, on this CPU.

    python -m benchmarks.axes [strategies]

Runs train a small BERT in fp32 on rows of one length, so that each step sends as much as the others. The kernel counts
bytes that are sent. Those kept are of parameters, gradients and states at the optimizer's last step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.axes_formulas import Kept, Sizes, kept_bytes
from benchmarks.communication import Count, count_bytes, expected_bytes, in_types
from benchmarks.environment import environment, write_results
from indictune.console_text import table

MICRO_BATCHES = 2
TEXT = "यह बहुत अच्छा है और मुझे पसंद आया " * 8  # more than JOB's 32 tokens
FP32 = ("float32", "float32")


@dataclass(frozen=True)
class Case:
    """A strategy on some processes.

    Attributes:
        strategy: a file in `accelerate_configs/`.
        sizes: of the axes.
        data: the strategy that splits the batch the same way without other axes.
    """

    strategy: str
    sizes: Sizes
    data: str

    @property
    def has_master_copies(self) -> bool:
        """Whether DeepSpeed updates copies of the weights."""
        return self.data.startswith("zero")

    def sent_bytes(self, count: Count) -> float:
        """Bytes that a rank should send in a step, over gloo."""
        return expected_bytes(self.data, count, *FP32, accumulation_steps=MICRO_BATCHES, ranks=self.sizes.data)

    def kept_bytes(self, count: Count) -> Kept:
        """Bytes that a rank should keep at the optimizer's step."""
        return kept_bytes(count.elements, self.sizes, self.has_master_copies, in_backward=False)


CASES = (
    Case("ddp", Sizes(data=4), "ddp"),
    Case("fsdp2", Sizes(data=4, split="weights"), "fsdp2"),
    Case("zero1", Sizes(data=4, split="states"), "zero1"),
    Case("zero2", Sizes(data=4, split="gradients"), "zero2"),
    Case("zero3", Sizes(data=4, split="weights"), "zero3"),
)


def write_rows(folder: Path) -> Path:
    """Rows of one length, in tokens."""
    path = folder / "rows.jsonl"
    rows = [{"text": TEXT, "label": ("negative", "positive")[number % 2]} for number in range(160)]
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def measure(case: Case) -> dict[str, Any]:
    """Train under a strategy; what the first rank sends and keeps, and what it should."""
    rows = 16 // MICRO_BATCHES // case.sizes.data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (*in_types(*FP32), "--per_device_train_batch_size", str(rows), "--active_vocabulary", "off")
        files = ("--train_file", str(write_rows(folder)), "--validation_split", "0")
        count = count_bytes(case.strategy, folder, *flags, ranks=case.sizes.world, rows=files)[0]
    kept = case.kept_bytes(count)
    return {
        "strategy": case.strategy,
        "ranks": case.sizes.world,
        "bytes_a_step": count.sent,
        "formula_bytes": case.sent_bytes(count),
        "kept_bytes": count.kept,
        "formula_kept_bytes": vars(kept),
    }


def _line(found: dict[str, Any]) -> list[str]:
    """A line of the table, in MB."""
    sent = [f"{found[name] / 1e6:.2f}" for name in ("bytes_a_step", "formula_bytes")]
    kept, formula = found["kept_bytes"], found["formula_kept_bytes"]
    pairs = [f"{kept[name] / 1e6:.2f} / {formula[name] / 1e6:.2f}" for name in formula]
    return [found["strategy"], str(found["ranks"]), *sent, *pairs]


def main() -> None:
    """Measure the strategies that are named, or all; print the table and write the result file."""
    about = environment()
    asked = sys.argv[1:] or [case.strategy for case in CASES]
    found = [measure(case) for case in CASES if case.strategy in asked]
    header = ["strategy", "ranks", "MB a step", "formula", *(f"{each} / formula" for each in found[0]["kept_bytes"])]
    print(table(header, [_line(each) for each in found]), end="\n\n")
    print(f"written to {write_results('axes', {'environment': about, 'strategies': found})}")


if __name__ == "__main__":
    main()
