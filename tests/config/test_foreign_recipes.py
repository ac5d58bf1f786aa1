"""Recipes of axolotl, LLaMA-Factory, ms-swift and TRL, as their authors write them, become recipes of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from indictune.cli import main
from indictune.config.command_line import load_recipe
from indictune.config.foreign_recipes import tool_of, translate
from indictune.config.recipe import read_recipe
from indictune.tasks.chat import Chat
from indictune.versions import recipes
from tests.ranks.launching import ROOT

FILES = ROOT / "tests/inputs/recipes_of_others"
# Keys that say nothing here, because they are the default or only switch something off.
SILENT = {"load_in_8bit", "stage", "do_train", "do_eval", "quant_method", "dataset_dir"}
EXPECTED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "axolotl": (
        "axolotl",
        {
            "method": "qlora",
            "model_name_or_path": "example/Llama-3-8B-Instruct",
            "chat_template": "llama3",
            "train_file": ["data/talks.jsonl"],
            "columns": {"messages": "dialog"},
            "max_length": 4096,
            "packing": True,
            "lora_r": 32,
            "lora_target_modules": "all-linear",
            "per_device_train_batch_size": 2,
            "global_batch_size": 8,
            "validation_split": 0.05,
            "attn_implementation": "flash_attention_2",
            "bf16": True,
            "warmup_steps": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 0.0625,
            "save_strategy": "epoch",
            "load_best_model_at_end": False,
            "report_to": "wandb",
            "optim": "paged_adamw_32bit",
        },
        {"model_type", "tokenizer_type", "strict", "pad_to_sequence_len", "group_by_length", "deepspeed"}
        | {"special_tokens"},
    ),
    "llama_factory": (
        "LLaMA-Factory",
        {
            "method": "qlora",
            "lora_r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0,
            "lora_target_modules": ["q_proj", "v_proj"],
            "chat_template": "llama3",
            "max_length": 1024,
            "global_batch_size": 8,
            "warmup_steps": 0.1,
            "validation_split": 0.1,
            "save_strategy": "steps",
            "train_file": ["lists/hindi.json"],
            "columns": {"instruction": "question", "output": "answer"},
        },
        {"max_samples", "overwrite_cache", "preprocessing_num_workers", "plot_loss", "overwrite_output_dir"},
    ),
    "ms_swift": (
        "ms-swift",
        {
            "method": "qlora",
            "model_name_or_path": "example/Qwen-7B-Instruct",
            "train_file": ["data/alpaca_hi.jsonl"],
            "validation_file": ["data/held_out.jsonl"],
            "lora_dropout": 0.1,
            "attn_implementation": "flash_attention_2",
            "global_batch_size": 32,
            "bf16": True,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.03,
        },
        {"system", "model_author", "model_name", "dataset data/alpaca_hi.jsonl#500"},
    ),
    "trl": (
        "TRL",
        {
            "method": "qlora",
            "max_length": 2048,
            "dataset_name": "example/chats",
            "dataset_config_name": "default",
            "dataset_splits": ["train=train_sft"],
            "lora_target_modules": ["q_proj", "k_proj"],
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "global_batch_size": 8,
            "load_best_model_at_end": False,
        },
        {"dataset_num_proc", "overwrite_output_dir", "loss_type", "dataset_mixture.test_split_size"},
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lists").mkdir()
    entry = {"file_name": "hindi.json", "columns": {"prompt": "question", "response": "answer"}}
    Path("lists/dataset_info.json").write_text(json.dumps({"hindi_alpaca": entry}))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_is_recognised_and_translated(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tool, recipe, left = EXPECTED[name]
    file = str(FILES / f"{name}.yaml")
    assert main(["train", file]) == 2
    assert f"is a recipe of {tool}. Type `indictune train {file} --convert" in capsys.readouterr().err
    assert main(["train", file, "--convert", "ours.yaml"]) == 0
    printed = capsys.readouterr().out
    assert {line.split(": ")[1].split(". ")[0] for line in printed.splitlines() if line.startswith("Left out")} == left
    written = yaml.safe_load(Path("ours.yaml").read_text(encoding="utf-8"))
    assert {key: written.get(key) for key in recipe} == recipe
    assert read_recipe(["--config", "ours.yaml"], Chat.arguments).problems == []
    assert main(["train", file, "--convert", "ours.yaml"]) == 2
    assert "[file-exists]" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_is_translated_or_named(name: str) -> None:
    tool, _, _ = EXPECTED[name]
    content = {key: value for key, value in load_recipe(FILES / f"{name}.yaml").items() if value is not None}
    content |= {"nobody_knows_this": "1"}
    nothing = translate({}, tool)
    are_defaults = nothing.recipe.items()
    for key, value in content.items():
        alone = translate({key: value}, tool)
        is_default = key in SILENT or value in dict(are_defaults).values()
        assert alone.left or alone.recipe != nothing.recipe or is_default, key
    assert translate({"nobody_knows_this": "1"}, tool).left.keys() == {"nobody_knows_this"}


def test_ours_and_typing_errors_are_of_no_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert {tool_of(load_recipe(path)) for path in recipes().values()} == {None}
    Path("r.yaml").write_text("base_model: m\nmicro_batch_size: two\n")
    assert main(["train", "r.yaml", "--convert", "o.yaml"]) == 2
    assert "'two'" in capsys.readouterr().err
    Path("r.yaml").write_text("packing: true\ncutoff_len: 9\n")
    assert main(["train", "r.yaml"]) == 2
    assert "Here it is `max_length`" in capsys.readouterr().err
    assert main(["train", "r.yaml", "--convert", "o.yaml"]) == 2
    assert "[recipe-of-no-tool]" in capsys.readouterr().err
    assert main(["train", "r.yaml", "--convert", "o.yaml", "--seed", "1"]) == 2
    assert "--seed 1 has no effect with --convert" in capsys.readouterr().err


def test_values_without_a_counterpart_are_named() -> None:
    given = {"stage": "dpo", "template": "gemma", "finetuning_type": "freeze", "val_size": "500", "dataset": "a,b"}
    made = translate(given, "LLaMA-Factory")
    assert made.left.keys() == given.keys()
    assert "has no a, data/dataset_info.json has no b. Use --train_file" in made.left["dataset"]
    made = translate({"train_type": "full", "dataset": ["x/y", "a.jsonl"]}, "ms-swift")
    assert (made.recipe["learning_rate"], made.recipe["global_batch_size"]) == ("1e-5", "16")
    assert "one dataset of the Hub" in made.left["dataset"]
    text = {"datasets": [{"path": "some/text", "type": "completion", "field": "body"}], "micro_batch_size": "2"}
    made = translate({**text, "base_model": "m"}, "axolotl")
    files = {"path": "json", "data_files": ["a.json", "b.json"], "ds_type": "json", "type": "alpaca"}
    assert translate({"datasets": [files]}, "axolotl").recipe["train_file"] == ["a.json", "b.json"]
    both = translate({"warmup_steps": "10", "warmup_ratio": "0.1"}, "TRL").recipe
    assert both["warmup_steps"] == "10"
    assert translate({"evals_per_epoch": "0"}, "axolotl").recipe["eval_strategy"] == "no"
    assert [made.recipe[each] for each in ("task", "text_column", "dataset_name")] == ["clm", "body", "some/text"]


def test_a_recipe_is_recognised_before_the_slow_imports() -> None:
    file = FILES / "axolotl.yaml"
    program = (
        f"import sys; from indictune.cli import main; main(['train', {str(file)!r}]); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, "[recipe-of-other-tool]" in done.stderr) == ("False\n", True)
