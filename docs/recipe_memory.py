"""The memory that each recipe needs, by `indictune plan`: the end of its header, which `docs.generate` writes."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from transformers import AlbertConfig, BertConfig, LlamaConfig, PreTrainedConfig

from benchmarks.axes_jobs import ENCODER, LARGE, SMALL
from indictune.commands.plan import ranking_of_flags
from indictune.commands.plan_text import MICRO_BATCHES
from indictune.config.command_line import read_flags
from indictune.console_text import shown_bytes
from indictune.planning.candidates import Candidate
from indictune.planning.memory import calibration

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").rglob("*.yaml"))
COMMAND = re.compile(r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?")
LINES = re.compile(r"(?:^# Expected memory.*\n)(?:^#.*\n)*", re.MULTILINE)
# Rows that are not here, or that no tokenizer here reads: without them, texts are as long as the recipe lets them be.
ROWS = re.compile(r"^(?:dataset|train|validation|test|text_pair)_\w+: .*\n", re.MULTILINE)
ROWS_ELSEWHERE = re.compile(ROWS.pattern.replace(": .*", ": (?!builtin:).*"), re.MULTILINE)
# Models of the Hub, by config.json. The one of 1B is that of meta-llama/Llama-3.2-1B.
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-70B": LARGE,
    "Llama-3.1-8B": SMALL,
    "IndicBERTv2-MLM-only": ENCODER,
    "fetched:multilingual-e5-small": BertConfig(
        vocab_size=250_037, hidden_size=384, num_attention_heads=12, intermediate_size=1536,
    ),
    "indic-bert": AlbertConfig(
        vocab_size=200_000, embedding_size=128, hidden_size=768, num_attention_heads=12, intermediate_size=3072,
    ),
    "marathi-bert-v2": BertConfig(vocab_size=197_285),
    "muril-base-cased": BertConfig(vocab_size=197_285),
    "bert-base-multilingual-uncased": BertConfig(vocab_size=105_879),
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=131_072,
    ),
}  # fmt: skip


def candidate_of(path: Path) -> Candidate:
    """What the plan says of a recipe under the first strategy file that its header names, else on one GPU."""
    text = path.read_text(encoding="utf-8")
    recipe: dict[str, Any] = yaml.safe_load(text)
    launched = COMMAND.search(text)
    strategy, gpus = ("single_gpu", "1") if launched is None else (launched[1], launched[2] or "1")
    batch = next(name for name in MICRO_BATCHES if name in recipe)
    words = ["--gpus", gpus, f"--{batch}", str(recipe[batch]), "--method", recipe.get("method", "full")]
    name = recipe["model_name_or_path"].rpartition("/")[2].removesuffix("-Instruct")
    with TemporaryDirectory() as folder:
        without_rows = Path(folder, path.name)
        left_out = ROWS if name in CONFIGS else ROWS_ELSEWHERE
        without_rows.write_text(left_out.sub("", text), encoding="utf-8")
        words += ["--config", str(without_rows)]
        if name in CONFIGS:
            CONFIGS[name].save_pretrained(folder)
            words += ["--model_name_or_path", folder]
        *_, ranking = ranking_of_flags(read_flags(words))
    return next(each for each in ranking.own if each.strategy == strategy)


def lines_of(each: Candidate) -> str:
    """The lines for a header."""
    assert each.memory is not None
    assert each.node is not None
    assert each.written is not None
    sizes = {name.replace("_", " "): size for name, size in asdict(each.memory).items() if size}
    terms = ", ".join(f"{name} {shown_bytes(size)}" for name, size in sizes.items())
    node, written = each.node, each.written
    text = f"Expected memory: {shown_bytes(each.memory.total_bytes)} on each GPU ({terms}), "
    text += f"{shown_bytes(node.needed)} of CPU memory on a node. On disk: {shown_bytes(written.checkpoint)} for a "
    text += f"checkpoint, {shown_bytes(written.model)} for the model. By `indictune plan`, {calibration()}."
    joined = re.sub(r" (?=[GM]B)", "\N{NO-BREAK SPACE}", text)
    filled = textwrap.fill(joined, 119, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    return filled.replace("\N{NO-BREAK SPACE}", " ") + "\n"


def with_memory(text: str, each: Candidate) -> str:
    """The text of a recipe with these lines at the end of its header."""
    text = LINES.sub("", text, count=1)
    end = re.search("^[^#]", text, re.MULTILINE)
    assert end is not None
    return text[: end.start()] + lines_of(each) + text[end.start() :]


def write_headers() -> None:
    """Renew the lines of all recipes."""
    for path in RECIPES:
        path.write_text(with_memory(path.read_text(encoding="utf-8"), candidate_of(path)), encoding="utf-8")
