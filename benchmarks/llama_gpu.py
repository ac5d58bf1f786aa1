"""Tokens a second and peak memory of `scripts/train_llama.py` beside plain TRL with the same settings, in one run.

    python -m benchmarks.llama_gpu --results benchmarks/results/llama_gpu.json

The model is a LLaMA of 8B parameters with random weights, built from its shapes, so nothing is downloaded; rows have
2,048 tokens or a little more and are cut there. Every run is a process of its own; ours and TRL's take turns, and
medians are compared. `--size tiny` tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.environment import environment
from indictune.models import builtin

SIZES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
}
VOCABULARY = 128256
MAX_LENGTH = 2048
BATCH = {"8b": 4, "tiny": 1}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": None,  # by size
    "max_steps": None,  # by the command line
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 1000,
    "seed": 0,
}
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}

PLAIN_TRL = """
import json, sys, torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
job = json.loads(sys.argv[1])
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                         bnb_4bit_compute_dtype=torch.bfloat16)
args = SFTConfig(output_dir=job["output_dir"], max_length=job["max_length"], assistant_only_loss=True,
                 save_strategy="no", report_to="none", optim=job["optim"], disable_tqdm=True,
                 use_cpu=not torch.cuda.is_available(),
                 model_init_kwargs={"dtype": torch.bfloat16}, **job["settings"])
trainer = SFTTrainer(job["model"], args=args, train_dataset=load_dataset("json", data_files=job["rows"])["train"],
                     peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **job["lora"]),
                     quantization_config=nf4 if job["method"] == "qlora" else None)
seconds = trainer.train().metrics["train_runtime"]
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
print("RESULT", json.dumps({"runtime_s": seconds, "peak_memory_bytes": peak}))
"""


def build(size: str, folder: Path) -> None:
    """Write the model in bf16 and the package's own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16", **SIZES[size]
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)


def write_rows(path: Path, count: int) -> None:
    """Rows of a few thousand digits, each of which is a token or a part of one."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            numbers = torch.randint(0, 10, (3 * MAX_LENGTH,), generator=generator).tolist()
            answer = " ".join(map(str, numbers))
            messages = [{"role": "user", "content": "Numbers?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def ours(job: dict[str, Any]) -> dict[str, float]:
    """Train through the script."""
    flags = {
        "model_name_or_path": job["model"],
        "train_file": job["rows"],
        "output_dir": job["output_dir"],
        "method": job["method"],
        "max_length": job["max_length"],
        "optim": job["optim"],
        "global_batch_size": job["settings"]["per_device_train_batch_size"],
        "lora_r": job["lora"]["r"],
        "lora_alpha": job["lora"]["lora_alpha"],
        "lora_dropout": job["lora"]["lora_dropout"],
        "save_strategy": "no",
        "disable_tqdm": True,
        **job["settings"],
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "scripts/train_llama.py", *words], check=True, stdout=subprocess.DEVNULL)
    train = json.loads((Path(job["output_dir"]) / "metrics.json").read_text(encoding="utf-8"))["train"]
    return {name: train[name] for name in ("runtime_s", "peak_memory_bytes")}


def plain_trl(job: dict[str, Any]) -> dict[str, float]:
    """Train through TRL alone."""
    command = [sys.executable, "-c", PLAIN_TRL, json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


def compare(job: dict[str, Any], repeats: int, work: Path) -> dict[str, Any]:
    """Both, in turns; medians and their ratio."""
    runs: dict[str, list[dict[str, float]]] = {"indictune": [], "trl": []}
    for repeat in range(repeats):
        for name, run in (("indictune", ours), ("trl", plain_trl)):
            runs[name].append(run({**job, "output_dir": str(work / f"{job['method']}-{name}-{repeat}")}))
            print(job["method"], name, runs[name][-1], flush=True)
    tokens = job["settings"]["max_steps"] * job["settings"]["per_device_train_batch_size"] * job["max_length"]
    result: dict[str, Any] = {
        name: {
            "tokens_per_second": tokens / statistics.median(each["runtime_s"] for each in done),
            "peak_memory_bytes": statistics.median(each["peak_memory_bytes"] for each in done),
            "runs": done,
        }
        for name, done in runs.items()
    }
    result["speed_ratio"] = result["indictune"]["tokens_per_second"] / result["trl"]["tokens_per_second"]
    return result


def main() -> None:
    """Compare both methods and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    settings = SETTINGS | {"per_device_train_batch_size": BATCH[arguments.size], "max_steps": arguments.steps}
    methods = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build(arguments.size, work / "model")
        write_rows(work / "rows.jsonl", arguments.steps * BATCH[arguments.size])
        for method in ("qlora", "lora"):
            optim = "paged_adamw_8bit" if method == "qlora" and gpu else "adamw_torch"
            job: dict[str, Any] = {"max_length": MAX_LENGTH, "settings": settings, "lora": LORA}
            job |= {"model": str(work / "model"), "rows": str(work / "rows.jsonl"), "method": method, "optim": optim}
            methods[method] = compare(job, arguments.repeats, work)
    content = {"environment": environment(), "size": arguments.size, "settings": settings, "methods": methods}
    arguments.results.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
