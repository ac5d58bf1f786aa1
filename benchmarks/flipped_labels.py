"""How many labels that were flipped on purpose does confident learning find? It has predictions out of fold.

    python -m benchmarks.flipped_labels
    python -m benchmarks.flipped_labels --sets marathi_3000 --data ../shared/data/sentiment \
        --recipe recipes/sentiment/small_data.yaml

Flips 5% of the labels to others at random, runs `indictune sweep --folds 5` on them, and takes as many rows of the
list as were flipped. Precision is the share of these that were flipped, recall the share of the flipped that are among
them. The simplest rule is measured too: the rows whose label gets the lowest probability. Other flags are the run's.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from benchmarks.quality import SETS, rows_of
from benchmarks.real_tweets import DEMO
from benchmarks.speed import Row, write_rows
from indictune.data.health.likely_wrong import OUT_OF_FOLD, read_out_of_fold, wrong_labels
from indictune.files import json_or_nothing


def flipped(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], set[int]]:
    """The rows with a share of the labels flipped to another one at random, and the numbers of these."""
    draw, labels = random.Random(seed), sorted({row["label"] for row in rows})
    chosen = set(draw.sample(range(len(rows)), round(share * len(rows))))
    others = {label: [other for other in labels if other != label] for label in labels}
    changed = [
        {**row, "label": draw.choice(others[row["label"]])} if number in chosen else dict(row)
        for number, row in enumerate(rows)
    ]
    return changed, chosen


def found_at(ranked: Sequence[str], wrong: set[str]) -> dict[str, float]:
    """Precision and recall of as many of the ranked rows as are wrong."""
    first = ranked[: len(wrong)]
    hits = len(wrong.intersection(first))
    return {"precision": round(hits / max(1, len(first)), 4), "recall": round(hits / len(wrong), 4)}


def measure(rows: Sequence[Row], options: argparse.Namespace, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Flip labels, train the folds, and compare what is found with what was flipped."""
    changed, chosen = flipped(rows, options.share, options.seed)
    file, out = write_rows(changed, folder / "train.jsonl"), folder / "sweep"
    named = ["--train_file", str(file), "--folds", str(options.folds), "--output_dir", str(out), *flags]
    command = ["indictune", "sweep", options.recipe, *named]
    subprocess.run([sys.executable, "-m", *command], check=True)
    predicted = read_out_of_fold(out / OUT_OF_FOLD)
    wrong = {f"{file}:{number + 1}" for number in chosen} & {row["row"] for row in predicted}
    least = sorted(predicted, key=lambda row: float(row["scores"].get(row["label"], 0.0)))
    listed = wrong_labels(predicted)
    agreeing = sum(max(row["scores"], key=row["scores"].get) == row["label"] for row in predicted)
    return {
        "command": " ".join(command).replace(str(folder), "WORK"),
        "rows": len(predicted),
        "flipped": len(wrong),
        "listed": len(listed.rows),
        "macro_f1_of_the_folds": round(json_or_nothing(out / "sweep.json")["trials"][0]["value"], 4),
        "agreement_of_the_folds": round(agreeing / len(predicted), 4),
        "confident_learning": found_at([row["row"] for row in listed.rows], wrong),
        "lowest_probability": found_at([row["row"] for row in least], wrong),
        "by_chance": round(len(wrong) / len(predicted), 4),
    }


def main() -> None:
    """Measure each set, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder of jsonl files")
    parser.add_argument("--sets", nargs="+", default=["built_in"], choices=SETS, help="whose training rows")
    parser.add_argument("--recipe", default=DEMO, help="of the runs")
    parser.add_argument("--share", type=float, default=0.05, help="of the labels that are flipped")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="draws the labels that are flipped")
    options, flags = parser.parse_known_args()
    sets: dict[str, Any] = {}
    for name in options.sets:
        with tempfile.TemporaryDirectory() as work:
            sets[name] = measure(rows_of(name, options.data)["train"], options, flags, Path(work))
        write_results("flipped-labels", {"environment": environment(), "sets": sets})
        print(name, sets[name])


if __name__ == "__main__":
    main()
