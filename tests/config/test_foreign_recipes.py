"""Recipes of axolotl, LLaMA-Factory, ms-swift and TRL, as their authors write them, become recipes of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from indictune.cli import main
from indictune.commands.train import read_asked
from indictune.config.command_line import load_recipe
from indictune.config.foreign_recipes import tool_of, translate
from indictune.config.recipe import read_recipe
from indictune.tasks.chat import CausalText, Chat
from indictune.versions import recipes
from tests.ranks.launching import ROOT

FILES = ROOT / "tests/inputs/recipes_of_others"
# Keys that say nothing here, because they are the default or only switch something off.
SILENT = {"load_in_8bit", "stage", "do_train", "do_eval", "quant_method", "dataset_dir", "loss_type"}
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
            "load_best_model_at_end": False,
            "report_to": "wandb",
            "optim": "paged_adamw_32bit",
        },
        {"model_type", "tokenizer_type", "strict", "pad_to_sequence_len", "group_by_length", "deepspeed"}
        | {"special_tokens", "evals_per_epoch", "saves_per_epoch"},
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
            "weight_decay": 0.1,
            "validation_split": 0,
        },
        {"system", "model_author", "model_name", "dataset data/alpaca_hi.jsonl#500"},
    ),
    "trl": (
        "TRL",
        {
            "method": "qlora",
            "max_length": 2048,
            "dataset_name": "example/chats",
            "dataset_splits": ["train=default/train_sft"],
            "train_on_prompts": True,
            "validation_split": 0,
            "lora_target_modules": ["q_proj", "k_proj"],
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "global_batch_size": 8,
            "load_best_model_at_end": False,
        },
        {"dataset_num_proc", "overwrite_output_dir", "dataset_mixture.test_split_size"},
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lists").mkdir()
    entry = {"file_name": "hindi.json", "columns": {"prompt": "question", "response": "answer"}}
    odd = {
        "file_name": "odd.json",
        "num_samples": 5,
        "tags": {"role_tag": "who"},
        "formatting": "new",
        "columns": None,
    }
    Path("lists/dataset_info.json").write_text(json.dumps({"hindi_alpaca": entry, "odd": odd}))
    for file in ("a.jsonl", "b.jsonl", "lists/hindi.json", "lists/odd.json"):
        Path(file).touch()


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
        assert alone.left != nothing.left or alone.recipe != nothing.recipe or is_default, key
    assert translate({"nobody_knows_this": "1"}, tool).left.keys() - nothing.left.keys() == {"nobody_knows_this"}


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


def _read_back(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], set[str]]:
    """What `--convert` writes of a recipe, as `train` reads it, and the keys that it says are left out."""
    Path("theirs.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    assert main(["train", "theirs.yaml", "--convert", "ours.yaml"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out.splitlines()
    assert not re.search(r"'-?\d[-+.\de]*'", Path("ours.yaml").read_text())
    asked = read_asked(["ours.yaml"])
    types = Chat.arguments if asked.task == "chat" else CausalText.arguments
    assert read_recipe(["--config", "ours.yaml"], types).problems == []
    return dict(asked.content), {line.split(": ")[1].split(". ")[0] for line in printed if line.startswith("Left out")}


_TRL = {"model_name_or_path": "m", "dataset_name": "o/x", "gradient_accumulation_steps": 2}
_AXOLOTL = {"base_model": "m", "micro_batch_size": 1}
_FACTORY = {"model_name_or_path": "m", "finetuning_type": "lora", "dataset_dir": "lists", "dataset": "hindi_alpaca"}
_SWIFT = {"model": "m", "train_type": "lora"}
_ROWS = {"path": "a.jsonl", "type": "chat_template"}
_MAPPED = {"path": "a.jsonl", "type": {"field_instruction": "q"}}
_FULL = {"lora_r": 8, "use_peft": False}
_COLUMNS = {"dataset_mixture": {"datasets": [{"id": "o/x", "columns": ["prompt", "completion"]}]}}
_OPTIONAL = {"completion_only_loss"}  # what it means depends on the rows
_HI = {"path": "o/x", "name": "hi"}


@pytest.mark.parametrize(
    ("given", "expected", "left"),
    [
        # What of a row is learned.
        (_TRL, {"train_on_prompts": "true", "learning_rate": "2e-5", "global_batch_size": "16"}, _OPTIONAL),
        (_TRL | {"assistant_only_loss": True}, {"train_on_prompts": "false"}, set()),
        (_TRL | {"assistant_only_loss": False}, {"train_on_prompts": "true"}, _OPTIONAL),
        (_TRL | {"completion_only_loss": True}, {"train_on_prompts": "false"}, set()),
        (_TRL | {"completion_only_loss": False}, {"train_on_prompts": "true"}, set()),
        (_TRL | _COLUMNS, {"train_on_prompts": "false", "dataset_name": "o/x"}, {"dataset_name"}),
        (_AXOLOTL | {"train_on_inputs": True}, {"train_on_prompts": "true", "max_length": "512"}, set()),
        (_FACTORY | {"train_on_prompt": True}, {"train_on_prompts": "true"}, set()),
        (_SWIFT | {"loss_scale": "all"}, {"train_on_prompts": "true"}, set()),
        # Several entries of rows.
        (
            _AXOLOTL | {"datasets": [_HI, {**_HI, "name": "ta", "split": "all"}]},
            {"dataset_name": "o/x", "dataset_config_name": None, "dataset_splits": ["train=hi/train+ta/all"]},
            set(),
        ),
        (
            _AXOLOTL | {"datasets": [_HI, {"path": "o/y", "name": "ta"}, _ROWS]},
            {"dataset_name": "o/x", "dataset_splits": ["train=hi/train"], "train_file": None},
            {"datasets o/y ta", "datasets a.jsonl"},
        ),
        (
            _AXOLOTL | {"datasets": [_ROWS, {"path": "b.jsonl", "type": "completion"}, _HI]},
            {"task": "chat", "train_file": ["a.jsonl"], "dataset_name": None},
            {"datasets b.jsonl", "datasets o/x hi"},
        ),
        (
            _AXOLOTL
            | {"datasets": [_ROWS, {**_ROWS, "path": "b.jsonl"}], "test_datasets": [{**_ROWS, "field_messages": "d"}]},
            {"train_file": ["a.jsonl", "b.jsonl"], "columns": None, "validation_file": None},
            {"test_datasets a.jsonl"},
        ),
        (
            _AXOLOTL | {"datasets": [{"path": "o/x", "type": "completion", "field": "body"}]},
            {"task": "clm", "text_column": "body", "dataset_name": "o/x", "max_length": "512"},
            set(),
        ),
        # Keys that were dropped, or of which another one counts.
        (_AXOLOTL | {"datasets": [_MAPPED]}, {"train_file": ["a.jsonl"]}, {"datasets.type"}),
        (
            _FACTORY | {"dataset": "odd"},
            {"train_file": ["lists/odd.json"]},
            {"dataset.num_samples", "dataset.tags", "dataset.formatting"},
        ),
        (_FACTORY | {"stage": "pt", "packing": True}, {"task": "clm", "text_column": "question"}, {"packing"}),
        (_TRL | {"warmup_steps": 0, "warmup_ratio": 0.1}, {"warmup_steps": "0.1"}, _OPTIONAL),
        (_TRL | {"warmup_ratio": 0.1, "warmup_steps": 9}, {"warmup_steps": "9"}, {"warmup_ratio"} | _OPTIONAL),
        (_TRL | {"dtype": "float32", "bf16": True}, {"bf16": "true"}, {"dtype"} | _OPTIONAL),
        (_TRL | {"eos_token": "<|im_end|>"}, {"chat_template": None}, {"eos_token"} | _OPTIONAL),
        (
            _TRL | {"chat_template": "llama3", "eos_token": "<|im_end|>"},
            {"chat_template": "llama3"},
            {"eos_token"} | _OPTIONAL,
        ),
        (_AXOLOTL | {"tokenizer_name_or_path": "t"}, {"model_name_or_path": "m"}, {"tokenizer_name_or_path"}),
        (_AXOLOTL | {"trust_remote_code": True}, {"trust_remote_code": None}, {"trust_remote_code"}),
        # Raw text.
        (
            _TRL | {"dataset_text_field": "body"},
            {"task": "clm", "text_column": "body", "train_on_prompts": None},
            set(),
        ),
        (_TRL | {"dataset_text_field": "text"}, {"task": "chat", "text_column": None}, _OPTIONAL),
        # What recognises them, and numbers as their authors write them.
        ({"use_peft": True, "lora_r": 4}, {"method": "lora", "lora_target_modules": ["q_proj", "v_proj"]}, _OPTIONAL),
        (_TRL | _FULL, {"method": None, "lora_r": None}, {"lora_r"} | _OPTIONAL),
        (_TRL | {"learning_rate": "2.0e-4", "run_name": "-"}, {"learning_rate": "2.0e-4", "run_name": "-"}, _OPTIONAL),
        (_AXOLOTL | {"warmup_steps": "10", "evals_per_epoch": 2}, {"warmup_steps": "10"}, {"evals_per_epoch"}),
    ],
)
def test_what_is_written_trains_the_same_or_says_what_is_left(
    given: dict[str, Any], expected: dict[str, Any], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, named = _read_back(given, capsys)
    assert {key: recipe.get(key) for key in expected} == expected
    assert named == left


@pytest.mark.parametrize(
    "given",
    [
        *({**_AXOLOTL, **each} for each in ({"rl": "dpo"}, {"load_in_8bit": True}, {"adapter": "llama-adapter"})),
        *({**_FACTORY, "stage": each} for each in ("dpo", "rm", "ppo", "kto")),
        *({**_FACTORY, **each} for each in ({"finetuning_type": "freeze"}, {"quantization_bit": 8})),
        *(
            {**_SWIFT, **each}
            for each in ({"rlhf_type": "dpo"}, {"train_type": "adalora"}, {"loss_scale": "last_round"})
        ),
        {**_AXOLOTL, "datasets": [{**_ROWS, "roles_to_train": ["user"]}]},
        {**_TRL, "loss_type": "sigmoid", "beta": 0.1},
        {**_FACTORY, "mask_history": True},
    ],
)
def test_another_objective_is_refused(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_text(yaml.safe_dump(given))
    assert main(["train", "theirs.yaml", "--convert", "ours.yaml"]) == 2
    assert "[no-such-name]" in capsys.readouterr().err
    assert not Path("ours.yaml").exists()


def test_values_without_a_counterpart_are_named() -> None:
    given = {"template": "gemma", "val_size": "500", "dataset": "a,b"}
    made = translate(given, "LLaMA-Factory")
    assert made.left.keys() == {"template", "val_size", "dataset"}
    made = translate({"train_type": "full", "dataset": ["x/y", "a.jsonl"]}, "ms-swift")
    assert (made.recipe["learning_rate"], made.recipe["global_batch_size"]) == ("1e-5", "16")
    assert made.left.keys() == {"dataset a.jsonl"}
    files = {"path": "json", "data_files": ["a.json", "b.json"], "ds_type": "json", "type": "alpaca"}
    assert translate({"datasets": [files]}, "axolotl").recipe["train_file"] == ["a.json", "b.json"]


def test_a_recipe_is_recognised_before_the_slow_imports() -> None:
    file = FILES / "axolotl.yaml"
    program = (
        f"import sys; from indictune.cli import main; main(['train', {str(file)!r}]); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, "[recipe-of-other-tool]" in done.stderr) == ("False\n", True)
