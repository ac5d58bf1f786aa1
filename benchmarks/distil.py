"""What students of multilingual-e5-small keep of its score: bytes, rows a second and macro-F1, by number of layers.

    indictune recipes --weights
    OMP_NUM_THREADS=2 python -m benchmarks.distil --data ../shared/data/sentiment --set hinglish --work WORK

The teacher is trained by recipes/sentiment/small_data.yaml on nine tenths of a set's training rows; the other tenth
chooses checkpoints, and the set's validation rows are the test rows. The students learn the teacher's answers to the
same nine tenths, and to the texts of `--more` without their labels. `--work` keeps all runs: a killed program goes on.
Each size is written to the result file when it is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, environment, write_results
from benchmarks.quality import SETS, rows_of
from benchmarks.speed import write_rows

RECIPE = "recipes/sentiment/small_data.yaml"
GOAL = {"bytes": 0.1, "macro_f1": 0.98}  # of the teacher's: at most, and at least


def run(*words: object) -> None:
    """Run the command, which resumes by itself."""
    subprocess.run([sys.executable, "-m", "indictune", *map(str, words)], check=True)


def share_of_teacher(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What a model of a table has of its teacher's bytes, speed and macro-F1, and whether that is the goal."""
    both, scores = (found[name], found["teacher"]), found[name]["scores"]["test"]["overall"]
    shares = {each: both[0][each] / both[1][each] for each in ("bytes", "rows_per_second")}
    shares["macro_f1"] = scores["second"] / scores["first"]
    return shares | {"goal": shares["bytes"] <= GOAL["bytes"] and shares["macro_f1"] >= GOAL["macro_f1"]}


def main() -> None:
    """Train the teacher, distil it for each number of layers, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    parser.add_argument("--set", choices=SETS, default="hinglish", help="as of benchmarks.quality")
    parser.add_argument("--more", nargs="*", default=[], help="files of more texts, whose labels are not read")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 4, 3, 2], help="of each student")
    parser.add_argument("--model", default="fetched:multilingual-e5-small", help="that the teacher begins with")
    parser.add_argument("--teacher_epochs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10, help="of each student")
    parser.add_argument("--learning_rate", default="2e-4", help="of each student")
    parser.add_argument("--temperature", default="2")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    rows, test = rows_of(options.set, options.data).values()
    train = [row for index, row in enumerate(rows) if index % 10 != 9]
    parts = {"train": train, "validation": rows[9::10], "test": test}
    options.work.mkdir(parents=True, exist_ok=True)
    files = {name: write_rows(part, options.work / f"{name}.jsonl") for name, part in parts.items()}
    teacher = options.work / "teacher"
    if not (teacher / "metrics.json").exists():
        flags = [word for name, file in files.items() for word in (f"--{name}_file", file)]
        flags += ["--model_name_or_path", options.model, "--num_train_epochs", options.teacher_epochs]
        flags += ["--drop_leaked_rows", "true", "--resume_from_checkpoint", "auto", "--output_dir", teacher]
        run("train", RECIPE, *flags)
    sizes: dict[str, Any] = {}
    for layers in options.layers:
        folder = options.work / f"student-{layers}"
        flags = ["--train_file", files["train"], *options.more, "--layers", layers]
        flags += ["--num_train_epochs", options.epochs, "--learning_rate", options.learning_rate]
        flags += ["--soft_label_temperature", options.temperature, "--output_dir", folder]
        run("distil", teacher, *flags)
        found = json.loads((folder / "distil.json").read_text(encoding="utf-8"))
        shares = {name: share_of_teacher(found, name) for name in found if name != "table"}
        sizes[f"{layers} layers"] = {"of_the_teacher": shares, **found}
        settings = {name: str(value) for name, value in vars(options).items() if not isinstance(value, Path)}
        counts = {name: len(part) for name, part in parts.items()}
        results = {"environment": environment(), "settings": settings, "rows": counts, "students": sizes}
        write_results(f"distil-{options.set.replace('_', '-')}", results, options.results)
        print(layers, "layers:", shares)


if __name__ == "__main__":
    main()
