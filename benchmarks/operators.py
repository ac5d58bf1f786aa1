"""What the processor does in a training step: the time of each operator, and how fast products of these shapes can be.

    python -m benchmarks.operators --train_file train.jsonl [--recipe recipes/sentiment/small_data.yaml] [flags ...]

The run is profiled for some steps (`--profile_steps`). An operator's own time is that without the operators it calls.
`products` compares the rate of a matrix product with the tokens of a step as its rows with that of a large square
product. So much of the peak is left to a model of this width, whatever calls the products.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.environment import environment, write_results
from benchmarks.quality import matmul_peak, product_rate

STEPS = 20
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
_WARM_UP = 5


def own_times(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Microseconds of each operator of a trace without those of the operators that it calls."""
    by_thread = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    found: Counter[str] = Counter()
    for some in by_thread.values():
        open_now: list[tuple[float, str]] = []  # end and name of the operators that contain the next one
        for event in sorted(some, key=lambda each: (each["ts"], -each["dur"])):
            while open_now and open_now[-1][0] <= event["ts"]:
                open_now.pop()
            if open_now:
                found[open_now[-1][1]] -= event["dur"]
            found[event["name"]] += event["dur"]
            open_now.append((event["ts"] + event["dur"], event["name"]))
    return found


def profiled(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """Train some steps; the share of each operator in a step, and the products' shapes and rates."""
    words = ["scripts/train_sentiment.py", "--config", options.recipe, "--train_file", str(options.train_file), *flags]
    words += ["--profile_steps", str(STEPS), "--max_steps", str(STEPS + _WARM_UP), "--output_dir", str(folder)]
    words += ["--report", "false", "--baseline", "false"]
    subprocess.run([sys.executable, *words], check=True)
    step_ms = json.loads((folder / "profile/profile.json").read_text(encoding="utf-8"))["ranks"][0]["step_s"] * 1e3
    with gzip.open(folder / "profile/rank-0.json.gz") as file:
        times = own_times(json.load(file)["traceEvents"])
    shares = Counter({name: us / 1e3 / STEPS / step_ms for name, us in times.items()})
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    train = metrics["train"]
    config = AutoConfig.from_pretrained(folder)
    tokens = round(train["tokens_per_second"] / train["samples_per_second"] * metrics["global_batch_size"])
    dtype = torch.bfloat16 if metrics["dtype"] == "bfloat16" else torch.float32
    shapes = [(tokens, config.hidden_size, width) for width in (config.hidden_size, config.intermediate_size)]
    peak = matmul_peak(dtype)
    return {
        "step_ms": step_ms,
        "tokens_per_step": tokens,
        "shares": dict(shares.most_common(options.most)),
        "in_products": sum(shares[name] for name in _PRODUCTS),
        "products": {" x ".join(map(str, shape)): product_rate(shape, dtype) / peak for shape in shapes},
        "peak_flops": peak,
    }


def main() -> None:
    """Print the table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--recipe", default="recipes/sentiment/small_data.yaml")
    parser.add_argument("--most", type=int, default=12, help="operators to show")
    options, flags = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        found = profiled(options, flags, Path(folder, "run"))
    write_results("operators", {"environment": environment(), "recipe": options.recipe, "flags": flags, **found})
    print(
        f"{found['step_ms']:.0f} ms a step, {found['tokens_per_step']} tokens, {found['in_products']:.0%} in products"
    )
    print("\n".join(f"| `{name}` | {share:.1%} |" for name, share in found["shares"].items()))
    print("\n".join(f"a product of {shape}: {share:.0%} of the peak" for shape, share in found["products"].items()))


if __name__ == "__main__":
    main()
