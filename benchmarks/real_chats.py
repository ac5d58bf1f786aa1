"""LLaMA's path on real conversations: a small LLaMA from random weights with LLaMA 2's real tokenizer.

    OMP_NUM_THREADS=1 python -m benchmarks.real_chats \\
        --data ../shared/data --results benchmarks/results/real_chats.json

Four sets go through `scripts/train_llama.py` as they are (self-instruct's seed tasks with their instances as rows):
alpaca in English, chats, seed tasks, Hindi reading comprehension. A tenth of each is held out. Two layers learn little
from that many steps; what shows is that every form is read, what the tokenizer costs each language, and that the loss
falls on held-out answers. `built_in` is `make demo-llama`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.environment import environment

DEMO = "recipes/llama/demo.yaml"
SCRIPT = "scripts/train_llama.py"
MAX_LENGTH = 3584  # the longest row of Hindi
FLAGS = {
    "chat_template": "llama2",
    "max_length": MAX_LENGTH,
    "dropout": 0,
    "global_batch_size": 4,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 40,
    "learning_rate": "2e-3",
    "warmup_steps": 4,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 40,
    "save_strategy": "no",
    "load_best_model_at_end": "false",
    "bf16": "false",
    "disable_tqdm": "true",
}

Row = dict[str, Any]


def seed_tasks(path: Path) -> list[Row]:
    """Each instance of a task as a row of its own."""
    tasks = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        {"instruction": task["instruction"], "input": instance["input"], "output": instance["output"]}
        for task in tasks
        for instance in task["instances"]
    ]
    return [row for row in rows if row["output"].strip()]


def data_sets(data: Path) -> dict[str, list[Row]]:
    """The rows of each set, in the form that they came in."""
    sft = data / "sft"
    return {
        "alpaca": json.loads((sft / "alpaca_en_demo.json").read_text(encoding="utf-8")),
        "chat": [json.loads(line) for line in (sft / "v1_sft_demo.jsonl").open(encoding="utf-8")],
        "seed_tasks": seed_tasks(sft / "seed_tasks.jsonl"),
        "hindi_question_answering": [
            json.loads(line) for line in (sft / "xquad_hi.messages.jsonl").open(encoding="utf-8")
        ],
    }


def build_model(tokenizer_model: Path, folder: Path) -> dict[str, Any]:
    """Write a small LLaMA with random weights and LLaMA 2's tokenizer; returns its size."""
    shutil.copy(tokenizer_model, folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **size)
    LlamaForCausalLM(config).save_pretrained(folder)
    return size


def split(rows: list[Row], folder: Path) -> dict[str, Path]:
    """Write every tenth row to a file of held-out rows, the others to one of training rows."""
    parts = {"train": [row for index, row in enumerate(rows) if index % 10], "validation": rows[::10]}
    paths = {}
    for name, part in parts.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part), encoding="utf-8")
    return paths


def train(flags: dict[str, Any], work: Path) -> Row:
    """Run the script; returns what it printed of the tokenizer, and its metrics."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, SCRIPT, *words, "--output_dir", str(work / "run")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    log = [json.loads(line) for line in (work / "run" / "train_log.jsonl").read_text(encoding="utf-8").splitlines()]
    metrics = json.loads((work / "run" / "metrics.json").read_text(encoding="utf-8"))
    printed = done.stdout.split("\n\n")
    return {
        "command": " ".join(["python", *command[1:]]).replace(str(work), "WORK"),
        "tokenizer": next(part for part in printed if "tokens/word" in part).splitlines(),
        "train_loss": {"first": log[0]["loss"], "last": log[-1]["loss"]},
        **{name: metrics[name] for name in ("train", "eval", "test") if name in metrics},
    }


def main() -> None:
    """Train on every set and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only_built_in", action="store_true", help="keep the other results as they are")
    arguments = parser.parse_args()
    sets: dict[str, Row] = {}
    if arguments.only_built_in:
        sets = json.loads(arguments.results.read_text(encoding="utf-8"))["sets"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        size = build_model(arguments.data / "tokenizers/llama2/tokenizer.model", Path(folder) / "model")
        sets["built_in"] = train({"config": DEMO}, Path(folder) / "built_in")
        for name, rows in ({} if arguments.only_built_in else data_sets(arguments.data)).items():
            work = Path(folder) / name
            work.mkdir()
            files = {f"{part}_file": path for part, path in split(rows, work).items()}
            sets[name] = train({"model_name_or_path": f"{folder}/model", **FLAGS, **files}, work)
            sets[name]["command"] = sets[name]["command"].replace(folder, "WORK")
            print(name, *sets[name]["tokenizer"], sets[name]["train_loss"], sep="\n", flush=True)
    content = {"environment": environment(), "model": size, "sets": sets}
    arguments.results.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
