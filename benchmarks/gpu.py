"""What needs a GPU, in one go: speed, losses and stages of the classifier, and LLaMA.

    python -m benchmarks.gpu [--minutes 9] [--parts device classifier losses stages ...]
    python -m benchmarks.gpu --parts compiled
    python -m benchmarks.gpu --parts compiled_losses
    python -m benchmarks.gpu --parts epoch
    python -m benchmarks.gpu --parts llama_lora

A BERT of IndicBERT-v2's shape with a vocabulary of 250,000 and random weights, on rows as long as tweets, by the
recipe for IndicBERT v2 and beside transformers' Trainer; then QLoRA on a LLaMA of 8B, beside TRL. Each part is a
process of its own with a limit of time: one that fails is told, and the others go on, but for `device`, which all
need. The classifier compiled beside itself, their losses, a whole epoch of 2M rows, and LoRA each have a go of their
own: they take longer than a share of nine minutes; the epoch, with its rows written and prepared before, some five of
them, by reckoning.
There is one result file a go, written whenever there is something new, so that one that is stopped keeps what it
found; the profiler's traces lie beside it. It ends with 1 where anything failed, or where losses do not agree or fall,
or padding costs nothing, and says what. One GPU is used, the first of several. Models lie in TMPDIR, 17 GB of them:
/dev/shm is quick where there is the memory. `--size tiny` tries the program on a CPU, in some minutes.
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

from benchmarks import classifier_gpu, classifier_losses, epoch, llama, llama_losses, stages
from benchmarks.environment import RESULTS, environment, results_path, write
from benchmarks.parts import Part, Plan, run_part

# Each part and its weight: it gets that share of the time which is left for it and those after it.
PARTS: dict[str, tuple[Part, int]] = {
    "device": (classifier_gpu.prepare, 0),  # it may have all
    "classifier": (classifier_gpu.compare, 17),
    "losses": (classifier_losses.compare_with_trainer, 9),  # twice the start of two
    "stages": (stages.measure, 10),
    "llama": (partial(llama.compare, "qlora"), 16),
    "llama_stages": (stages.measure_llama, 7),
    "llama_losses": (llama_losses.compare, 6),
    "compiled": (classifier_gpu.compare_compiled, 7),
    "compiled_losses": (classifier_losses.compare_with_compiled, 7),
    "epoch": (epoch.measure, 14),
    "llama_lora": (partial(llama.compare, "lora"), 14),
}
NEEDED = "device"  # by all others
IN_GOES_OF_THEIR_OWN = ("compiled", "compiled_losses", "epoch", "llama_lora")
IN_ONE_GO = [title for title in PARTS if title not in IN_GOES_OF_THEIR_OWN]
# Of all that runs. A contender gives its memory back after each lap and takes it again. Where every step has another
# number of tokens, as ours do, it would still ask the GPU for pieces of new sizes in the steps that are timed, and one
# whose steps are all alike would not: pieces that can grow are all found in the first steps, which are not timed.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
WRONG = {"agrees": "losses do not agree", "learned": "nothing is learned"}  # where a part has found that it is not so
SECONDS_TO_END = 25.0  # what is imported before the clock starts, and the end of the last part


def deadline_of(title: str, chosen: Sequence[str], start: float, end: float) -> float:
    """When a part is stopped. What all others need may take until the end: without it they have no use for the time.

    Args:
        title: of the part.
        chosen: all parts, in order.
        start: of the part.
        end: of all.
    """
    weights = [PARTS[each][1] for each in chosen[chosen.index(title) :]]
    return end if title == NEEDED else start + (end - start) * weights[0] / sum(weights)


def left_out(chosen: Sequence[str]) -> str:
    """Which parts a go does not measure, and by which commands they are; empty where there are none."""
    titles = [title for title in PARTS if title not in chosen]
    goes = [" ".join(title for title in titles if title in IN_ONE_GO)]
    goes += [title for title in titles if title in IN_GOES_OF_THEIR_OWN]
    commands = " and ".join(f"`python -m benchmarks.gpu --parts {go}`" for go in goes if go)
    return f"Not measured: {', '.join(titles)}. It takes {commands}." if titles else ""


def first_gpu(visible: str | None) -> str:
    """Of those that CUDA_VISIBLE_DEVICES names, as SLURM names all of a node; empty where it hides all. The Trainer
    would split each batch over all GPUs that it sees."""
    return "0" if visible is None else visible.partition(",")[0]


def failures(parts: dict[str, Any], size: str) -> list[str]:
    """The parts that failed, and of others the contenders that did, or what is wrong with what they found.

    Args:
        parts: findings of each, by its title.
        size: `full` or `tiny`, whose two laps may cost anything.

    Returns:
        `part`, `part (contender)` or `part (what is wrong)`.
    """
    found = []
    for title, part in parts.items():
        found += [title] * ("error" in part)
        found += [f"{title} ({told})" for name, told in WRONG.items() if part.get(name) is False]
        if size != "tiny" and part.get("padding_is_seen") is False:
            found.append(f"{title} (padding is not seen)")
        found += [f"{title} ({line['contender']})" for line in part.get("contenders", []) if "error" in line]
    return found


def name_of(chosen: Sequence[str], size: str, full_length: bool) -> str:
    """Of the result file and the traces: what another go measures has another name.

    Args:
        chosen: all parts, in order.
        size: `full` or `tiny`.
        full_length: whether LLaMA's rows are as long as they may be.
    """
    parts = [] if list(chosen) == IN_ONE_GO else chosen
    return "-".join(["gpu", *parts, *["full-length"] * full_length, *[size] * (size != "full")])


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=9.0, help="never longer than this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=IN_ONE_GO, help=f"beside `{NEEDED}`")
    parser.add_argument("--full_length", action="store_true", help="LLaMA's rows have all 1,024 tokens")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ.setdefault(ALLOCATOR, "expandable_segments:True")  # read by the processes that are started from here on
    end = time.time() + 60 * options.minutes - SECONDS_TO_END
    options.results.mkdir(parents=True, exist_ok=True)
    chosen = [title for title in PARTS if title in (NEEDED, *options.parts)]
    name = name_of(chosen, options.size, options.full_length)
    about = environment()
    path = results_path(name, options.results, about)  # once: a go may last past midnight
    results: dict[str, Any] = {
        "environment": about,
        "allocator": os.environ[ALLOCATOR],
        "size": options.size,
        "full_length": options.full_length,
        "not_measured": left_out(chosen),
        "parts": {},
    }
    trace = path.with_suffix(".trace.json.gz")
    with tempfile.TemporaryDirectory() as folder:
        for title in chosen:
            start = time.time()
            deadline = deadline_of(title, chosen, start, end)
            found: dict[str, Any] = {}
            results["parts"][title] = found

            def note(finding: dict[str, Any], found: dict[str, Any] = found) -> None:
                found |= finding
                write(path, results)

            print(f"-- {title}: {deadline - start:.0f} s at most", flush=True)
            plan = Plan(options.size, Path(folder), trace, options.full_length, start, deadline)
            run_part(PARTS[title][0], plan, note)
            note({"seconds": round(time.time() - start, 1)})
            if "error" in found:
                print(f"{title} failed:\n{found['error']}", flush=True)
                if title == NEEDED:
                    sys.exit(f"All other parts need `{NEEDED}`, and were not begun. Mend it, or give more --minutes.")
        print(left_out(chosen))
        print(f"written to {path}")
    if failed := failures(results["parts"], options.size):
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
