"""All measurements that need a GPU, within nine minutes: speed and losses of the classifier and of LLaMA.

    python -m benchmarks.gpu [--minutes 9] [--parts classifier losses llama llama_losses]
    python -m benchmarks.gpu --parts compiled | epoch | llama_lora

The classifier is a BERT of IndicBERT-v2's shape with random weights, on rows as long as tweets. The recipe for
IndicBERT v2 and transformers' Trainer train it. LLaMA is an 8B model under QLoRA, trained by us and by TRL. Compiling,
a complete epoch of 2M rows, and LoRA need separate runs.

Each part is a process with a time limit. If a part fails, the others still run, except `inputs`, which all need. The
result file is rewritten after each finding. The program exits with 1 if a part failed, or losses do not agree or
fall. It uses the first visible GPU. Models take 17 GB in TMPDIR. `--size tiny` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import classifier_gpu, curves, epoch, llama
from benchmarks.environment import RESULTS, environment, results_path, write
from benchmarks.timed_parts import Part, Plan, run_part

# Each part, and its weight in the time that is left for it and the parts after it.
PARTS: dict[str, tuple[Part, int]] = {
    "inputs": (classifier_gpu.prepare, 0),  # it may use all of the time
    "classifier": (classifier_gpu.compare, 17),
    "losses": (curves.compare_with_trainer, 9),
    "llama": (partial(llama.compare, "qlora"), 20),
    "llama_losses": (curves.compare_with_trl, 6),
    "compiled": (classifier_gpu.compare_compiled, 7),
    "epoch": (epoch.measure, 14),
    "llama_lora": (partial(llama.compare, "lora"), 14),
}
NEEDED = "inputs"  # by all other parts
DEFAULT_PARTS = ["inputs", "classifier", "losses", "llama", "llama_losses"]
# Steps differ in their tokens; without segments that grow, the allocator would ask the GPU for memory in timed steps.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CHECKS = {"agrees": "losses do not agree", "learned": "nothing is learned"}
SECONDS_TO_END = 25.0  # for imports before the clock starts, and for the end of the last part


def deadline_of(title: str, chosen: Sequence[str], start: float, end: float) -> float:
    """When a part is stopped; `inputs` may take until the end.

    Args:
        title: of the part.
        chosen: all parts, in order.
        start: of the part.
        end: of the program.
    """
    weights = [PARTS[each][1] for each in chosen[chosen.index(title) :]]
    return end if title == NEEDED else start + (end - start) * weights[0] / sum(weights)


def first_gpu(visible: str | None) -> str:
    """The first GPU of CUDA_VISIBLE_DEVICES, because the Trainer splits each batch over all it sees."""
    return "0" if visible is None else visible.partition(",")[0]


def failures(parts: dict[str, Any]) -> list[str]:
    """Parts and contenders that failed, by findings: `part`, `part (contender)` or `part (problem)`."""
    found = []
    for title, part in parts.items():
        found += [title] * ("error" in part)
        found += [f"{title} ({problem})" for name, problem in CHECKS.items() if part.get(name) is False]
        found += [f"{title} ({line['contender']})" for line in part.get("contenders", []) if "error" in line]
    return found


def result_name(chosen: Sequence[str], size: str) -> str:
    """The name of the result file, which differs where what is measured differs."""
    parts = [] if list(chosen) == DEFAULT_PARTS else chosen
    return "-".join(["gpu", *parts, *[size] * (size != "full")])


def run_parts(chosen: Sequence[str], options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run the parts one after the other, and write all findings to `path`; return the findings of each part."""
    end = time.time() + 60 * options.minutes - SECONDS_TO_END
    parts: dict[str, Any] = {}
    results = {"environment": environment(), "size": options.size, "parts": parts}
    with tempfile.TemporaryDirectory() as folder:
        for title in chosen:
            start = time.time()
            deadline = deadline_of(title, chosen, start, end)
            found: dict[str, Any] = {}
            parts[title] = found

            def note(finding: dict[str, Any], found: dict[str, Any] = found) -> None:
                found |= finding
                write(path, results)

            print(f"-- {title}: {deadline - start:.0f} s at most", flush=True)
            run_part(PARTS[title][0], Plan(options.size, Path(folder), deadline), note)
            note({"seconds": round(time.time() - start, 1)})
            if "error" in found:
                print(f"{title} failed:\n{found['error']}", flush=True)
                if title == NEEDED:
                    sys.exit(f"All other parts need `{NEEDED}`. Mend it, or give more --minutes.")
    return parts


def main() -> None:
    """Parse the flags, run the parts and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the program")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT_PARTS, help=f"in addition to `{NEEDED}`")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
    options.results.mkdir(parents=True, exist_ok=True)
    chosen = [title for title in PARTS if title in (NEEDED, *options.parts)]
    path = results_path(result_name(chosen, options.size), options.results)
    parts = run_parts(chosen, options, path)
    print(f"written to {path}")
    if failed := failures(parts):
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
