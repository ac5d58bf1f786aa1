"""The tables of docs/scale.md, of the newest result files of benchmarks/scale.py: `docs.generate` puts them there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import RESULTS
from benchmarks.row_lengths import TWEETS, draw_lengths
from indictune.planning.hardware import known_gpus

PAGE = Path(__file__).with_name("scale.md")
SECTION = re.compile(r"(<!-- (?P<name>preparation|labels|computed) -->\n).*?(?=\n<!-- end -->)", re.S)
GPU = "a100"
SHARE = 0.2  # of the GPU's peak: assumed; small encoders reach less of it than LLaMA does
ROWS = {"1e8": 10**8, "1e9": 10**9}
GPUS = (1, 8, 64)
# Layers, hidden and intermediate size.
ENCODERS = {"multilingual-e5-small": (12, 384, 1536), "IndicBERT v2": (12, 768, 3072)}


def page_with_tables() -> str:
    """The page with its tables made anew."""
    made = {"preparation": preparation_table, "labels": labels_table, "computed": computed_table}
    return SECTION.sub(lambda found: found[1] + made[found["name"]](), PAGE.read_text(encoding="utf-8"))


def newest(part: str) -> tuple[Path, dict[str, Any]]:
    """The newest result file of a part."""
    path = max(RESULTS.glob(f"*-scale-{part}.json"))
    return path, json.loads(path.read_text(encoding="utf-8"))


def _stages(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in found.items() if isinstance(each, dict) and "peak_bytes" in each}


def preparation_table() -> str:
    """Seconds, rows a second and memory of each stage."""
    path, found = newest("preparation")
    lines = [f"| {found['rows']:,} rows | cores | seconds | rows a second | memory in MB |", "|---|---|---|---|---|"]
    for name, each in _stages(found).items():
        numbers = f"{each['seconds']:.0f} | {each['rows_per_second']:,} | {each['peak_bytes'] / 1e6:,.0f}"
        lines.append(f"| {name} | {each['cores']} | {numbers} |")
    return "\n".join([*lines, "", f"Source: `benchmarks/results/{path.name}`."])


def labels_table() -> str:
    """Rows a second of each way to label."""
    path, found = newest("labels")
    lines = ["| way | seconds, with the start | rows a second |", "|---|---|---|"]
    lines += [
        f"| {name} | {each['seconds']:.0f} | {each['rows_per_second']:,.0f} |" for name, each in found["ways"].items()
    ]
    equal = "All ways gave equal labels and scores." if found["all_equal"] else "The ways gave different labels."
    return "\n".join([*lines, "", f"{equal} Source: `benchmarks/results/{path.name}`."])


def computed_table() -> str:
    """Hours for many rows, by the formulas of the page."""
    rate = _stages(newest("preparation")[1])["read, clean, check, tokenise"]["rows_per_second"]
    tokens = float(np.mean(draw_lengths(TWEETS, 100_000, np.random.default_rng(0))))
    header = ["tweets", "model", "preparation, two cores", *(f"labels, {gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for shown, rows in ROWS.items():
        for name, (layers, hidden, wide) in ENCODERS.items():
            operations = 2 * layers * (4 * hidden**2 + 2 * hidden * wide) * tokens
            of_gpu = SHARE * known_gpus()[GPU]["tflops"] * 1e12 / operations
            hours = [rows / rate / 3600, *(rows / (gpus * of_gpu) / 3600 for gpus in GPUS)]
            lines.append(f"| {shown} | {name} | {' | '.join(f'{each:.2g} h' for each in hours)} |")
    return "\n".join([*lines, "", f"Computed, not measured, with {tokens:.0f} tokens a tweet."])
