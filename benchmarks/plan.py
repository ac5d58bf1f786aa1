"""Predicted next to measured memory: what a rank keeps under each strategy file, here, and peaks on a GPU.

    python -m benchmarks.plan [--ranks 2 4] [strategies]
    python -m benchmarks.plan --peaks

The first trains a small BERT in fp32, as `benchmarks/axes.py` does, and counts parameters, gradients and optimizer
states before and after they are sharded. The second trains with one process and compares the peak of the GPU's
allocator with the estimate. It writes `indictune/planning/calibration.json`, which `indictune plan` reads.
Without a GPU it compares with the peak of torch's CPU allocator, on the built-in models, writes nothing and ends with
code 2. It then trains without dropout, for which only a CPU keeps fp32 noise and the attention's matrix, and adds the
fp32 copies of the logits that only a CPU makes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.axes import CASES, MICRO_BATCHES, ROWS, TOKENS, Case, measure, write_rows
from benchmarks.communication import count_peak, in_types
from benchmarks.environment import environment, write, write_results
from indictune.cli import EXIT_REFUSED
from indictune.commands.prepare import task_of_flags
from indictune.config.command_line import read_flags
from indictune.console_text import table
from indictune.models.builtin import resolve
from indictune.planning.machine_failures import PARTS, estimated
from indictune.planning.memory import CALIBRATION
from indictune.planning.step_time import AxisSizes, DataSplit
from indictune.preflight.values import plan_of_rows

# Files that only share the batch: the engine, and what it splits.
DATA: dict[str, tuple[str, DataSplit]] = {
    "ddp": ("ddp", "nothing"),
    "fsdp2": ("fsdp2", "weights"),
    "fsdp2_offload": ("fsdp2", "weights"),
    "fsdp2_qlora": ("fsdp2", "weights"),
    "zero1": ("zero1", "states"),
    "zero2": ("zero2", "gradients"),
    "zero2_offload": ("zero2", "gradients"),
    "zero3": ("zero3", "weights"),
    "zero3_offload": ("zero3", "weights"),
}
SHARDED_STAGES = Case("pipeline", AxisSizes(data=2, pipeline=2, split="weights"), "fsdp2")
WIDER: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
METHODS = [("sentiment", "full"), ("sentiment", "lora"), ("llama", "full"), ("llama", "lora"), ("llama", "qlora")]
SETTINGS = [(*each, *others) for each, others in product(METHODS, product((4, 16), (False, True)))]  # rows, keeps
LENGTHS = {"sentiment": TOKENS, "llama": 512}


def cases(ranks: int) -> list[Case]:
    """Every strategy file that runs on so many processes; one process shows what is kept before sharding."""
    if ranks == 1:
        return [Case("single_gpu", AxisSizes(), "ddp")]
    data = DATA if ranks <= ROWS // MICRO_BATCHES else {}  # each process needs a row of a micro-batch
    of_data = [Case(name, AxisSizes(data=ranks, split=split), engine) for name, (engine, split) in data.items()]
    others = [*CASES, SHARDED_STAGES]
    return of_data + [each for each in others if each.sizes.world == ranks and each.strategy not in DATA]


def error_of(found: dict[str, Any]) -> float:
    """The largest share by which a term differs from its prediction."""
    kept, formula = found["kept_bytes"], found["formula_kept_bytes"]
    pairs = [(formula[name], kept[name]) for name in PARTS]
    if found["between_bytes"] is not None:
        pairs.append((found["formula_between_bytes"], found["between_bytes"]))
    return max(float(abs(predicted / measured - 1)) for predicted, measured in pairs)


def _kept_line(found: dict[str, Any]) -> list[str]:
    kept, formula = found["kept_bytes"], found["formula_kept_bytes"]
    pairs = [f"{formula[name] / 1e6:.2f} / {kept[name] / 1e6:.2f}" for name in PARTS]
    return [found["strategy"], str(found["ranks"]), *pairs, f"{error_of(found):.2%}"]


def compare_kept(asked: list[str], all_ranks: list[int]) -> None:
    """Measure, print the table and write the result file, after each case."""
    about = environment()
    chosen = [each for ranks in all_ranks for each in cases(ranks) if not asked or each.strategy in asked]
    found = []
    for case in chosen:
        found.append(measure(case))
        print(" ".join(_kept_line(found[-1])), flush=True)
        written = write_results("plan", {"environment": about, "strategies": found})
    header = ["strategy", "ranks", *(f"{name}: predicted / MB" for name in PARTS), "largest error"]
    print(table(header, [_kept_line(each) for each in found]), end="\n\n")
    print(f"written to {written}")


def widened(task: str, folder: Path) -> Path:
    """A built-in model with random weights, wide enough that its tensors, not the allocator's gaps, make the peak."""
    source, name = resolve(tiny(task)), folder / task
    config = AutoConfig.from_pretrained(source, **WIDER)
    kind = AutoModelForCausalLM if task == "llama" else AutoModelForSequenceClassification
    model: Any = kind.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(name)
    AutoTokenizer.from_pretrained(source).save_pretrained(name)
    return name


def copied_logits(words: int, tokens: int) -> int:
    """Bytes of what TRL (1.16, `_backward_tile`) makes of logits on a CPU alone: seven fp32 copies and a mask."""
    return min(tokens, 4096) * min(words, 32768) * (7 * 4 + 1)


def compare_peak(
    task: str, method: str, rows: int, keeps_inputs: bool, model: str, anew: bool = True
) -> dict[str, Any]:
    """Train a few steps under a setting; `predicted` and `measured` bytes. `anew` is that of `start`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (*in_types("float32", "bfloat16"), "--model_name_or_path", model, "--method", method)
        flags += ("--global_batch_size", str(rows), "--per_device_train_batch_size", str(rows))
        flags += ("--max_length", str(LENGTHS[task]), "--gradient_checkpointing", str(keeps_inputs).lower())
        flags += () if task == "llama" else ("--active_vocabulary", "off")
        flags += () if torch.cuda.is_available() else ("--dropout", "0")
        files = ("--train_file", str(write_rows(folder, task == "llama")), "--validation_split", "0")
        recipe, own = task_of_flags(read_flags([*files, *flags, "--output_dir", str(folder / "run")]))
        plan = plan_of_rows(recipe, own)[0]
        memory = estimated(plan)
        assert memory is not None
        assert plan.model_config is not None
        is_copied = task == "llama" and not torch.cuda.is_available()
        copied = copied_logits(plan.model_config.vocab_size, rows * LENGTHS[task]) if is_copied else 0
        measured = count_peak(folder, *files, *flags, task=task, anew=anew)
    predicted = memory.total_bytes - memory.framework + copied
    terms = {"terms": asdict(memory), "predicted": predicted, "measured": measured}
    return {"task": task, "method": method, "rows": rows, "gradient_checkpointing": keeps_inputs, **terms}


def tiny(task: str) -> str:
    """The built-in model of a task."""
    return f"builtin:tiny-indic-{'llama' if task == 'llama' else 'bert'}"


def _peak_line(found: dict[str, Any]) -> list[str]:
    predicted, measured = found["predicted"], found["measured"]
    words = [found["task"], found["method"], str(found["rows"]), str(found["gradient_checkpointing"])]
    return [*words, f"{predicted / 1e6:,.1f}", f"{measured / 1e6:,.1f}", f"{predicted / measured - 1:+.0%}"]


def compare_peaks() -> int:
    """Measure all settings and print the table; on a GPU, write the calibration. Returns the exit code."""
    about, on_gpu = environment(), torch.cuda.is_available()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for task, method, rows, keeps_inputs in SETTINGS:
            model = str(widened(task, Path(name))) if on_gpu else tiny(task)
            found.append(compare_peak(task, method, rows, keeps_inputs, model))
            print(" ".join(_peak_line(found[-1])), flush=True)
    header = ["task", "method", "rows", "checkpointing", "predicted MB", "measured MB", "difference"]
    print(table(header, [_peak_line(each) for each in found]), end="\n\n")
    if not on_gpu:
        print("There is no GPU: these are peaks of torch's CPU allocator, and no calibration is written.")
        return EXIT_REFUSED
    write(CALIBRATION, {"environment": about, "settings": found})
    print(f"written to {CALIBRATION}")
    return 0


def main() -> int:
    """Parse the flags and measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", help="files; all if none is named")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--peaks", action="store_true", help="compare peaks of one process")
    options = parser.parse_args()
    if options.peaks:
        return compare_peaks()
    compare_kept(options.strategies, options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
