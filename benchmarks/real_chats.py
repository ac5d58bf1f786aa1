"""LLaMA's path on real conversations: a small LLaMA from random weights with LLaMA 2's real tokenizer.

    OMP_NUM_THREADS=1 python -m benchmarks.real_chats --data ../shared/data

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

from benchmarks.environment import environment, results_path

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
    "max_steps": 24,
    "learning_rate": "2e-3",
    "warmup_steps": 4,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": "false",
    "bf16": "false",
    "disable_tqdm": "true",
}

SETS = {
    "alpaca": "alpaca_en_demo.json",
    "chat": "v1_sft_demo.jsonl",
    "seed_tasks": "seed_tasks.jsonl",
    "hindi_question_answering": "xquad_hi.messages.jsonl",
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


def rows_of(name: str, sft: Path) -> list[Row]:
    """The rows of a set, in the form that they came in."""
    path = sft / SETS[name]
    if name == "seed_tasks":
        return seed_tasks(path)
    text = path.read_text(encoding="utf-8")
    rows: list[Row] = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return rows


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
        "command": " ".join(["python", *command[1:]]),
        "tokenizer": next(part for part in printed if "tokens/word" in part).splitlines(),
        "train_loss": {"first": log[0]["loss"], "last": log[-1]["loss"]},
        **{name: metrics[name] for name in ("train", "eval", "test") if name in metrics},
    }


def main() -> None:
    """Train on every set; the results are written after each, beside those of the sets that are not asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=results_path("real-chats"), help="the JSON file to write")
    parser.add_argument("--sets", nargs="+", default=["built_in", *SETS])
    arguments = parser.parse_args()
    path: Path = arguments.results
    content: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sets": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        content["model"] = build_model(arguments.data / "tokenizers/llama2/tokenizer.model", model)
        for name in arguments.sets:
            work = Path(folder) / name
            work.mkdir()
            if name == "built_in":
                result = train({"config": DEMO}, work)
            else:
                files = split(rows_of(name, arguments.data / "sft"), work)
                flags = {f"{part}_file": file for part, file in files.items()}
                result = train({"model_name_or_path": model, **FLAGS, **flags}, work)
            result["command"] = result["command"].replace(folder, "WORK")
            content["sets"][name] = {"environment": environment(), **result}
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            print(name, *result["tokenizer"], result["train_loss"], sep="\n", flush=True)


if __name__ == "__main__":
    main()
