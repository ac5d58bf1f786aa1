"""Recipes of axolotl, LLaMA-Factory, ms-swift and TRL, known by their keys and translated key by key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from indictune.config.command_line import aliases, flags_of

_NO_FLAG = "There is no such flag here."
_BY_NAME = "Roles and texts are found by their usual names."
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}  # of LLaMA-Factory's list
_SHAREGPT = "conversations"  # a form of its own
_PLAIN = re.compile(r"-?\d+(\.\d+)?|true|false")  # values that need no quotes
_ENDINGS = {".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt", ".gz", ".zst"}  # of files of rows
_OF_ROWS = ("datasets", "test_datasets", "dataset", "val_dataset", "eval_dataset", "dataset_mixture", "dataset_dir")
_OF_SPLITS = {"dataset_train_split": "train", "dataset_test_split": "validation"}  # of TRL
_PER_EPOCH = {"evals_per_epoch": "eval", "saves_per_epoch": "save"}  # of axolotl
_ROWS_OF_A_STEP = {"LLaMA-Factory": (8, 1), "TRL": (8, 1), "ms-swift": (1, 16), "axolotl": (1, 1)}  # and steps


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files("indictune.config").joinpath("foreign.toml").read_text(encoding="utf-8"))


def tool_of(content: Mapping[str, Any]) -> str | None:
    """The tool whose recipe this is; None for one of ours, whose keys may have typing errors."""
    ours = flags_of("chat").keys()
    marks = {tool: len({*keys} & content.keys() - ours) for tool, keys in _tables()["marks"].items()}
    tool = max(marks, key=lambda each: marks[each])
    return tool if marks[tool] > 1 and "task" not in content else None


@dataclass
class Translation:
    """A recipe of ours that does what one of another tool did, and why each of the other keys was left out."""

    tool: str
    recipe: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def text(self, source: Path) -> str:
        """The recipe as a file."""
        head = f"# Made of {source.name}, a recipe of {self.tool}. global_batch_size is that of one GPU."
        left = [f"# {key} was left out: {reason}" for key, reason in self.left.items()]
        read = (
            (key, yaml.safe_load(each) if _PLAIN.fullmatch(str(each)) else each) for key, each in self.recipe.items()
        )
        body = yaml.safe_dump(dict(read), sort_keys=False, allow_unicode=True)
        return "\n".join([head, *left, body])


def translate(content: Mapping[str, Any], tool: str) -> Translation:
    """What a recipe of that tool says, in our words."""
    given = {str(key): value for key, value in content.items() if value not in (None, "", [], {})}
    made = Translation(tool, {"task": "chat", **_tables()["defaults"][tool]})
    for key, value in given.items():
        if key in _OF_SPLITS:
            made.recipe.setdefault("dataset_splits", []).append(f"{_OF_SPLITS[key]}={value}")
        elif key not in (
            *_OF_ROWS,
            *_PER_EPOCH,
            "gradient_accumulation_steps",
            "warmup_steps" in given and "warmup_ratio",
        ):
            _translate_key(key, value, made)
    _add_rows(given, made)
    rows, steps = _ROWS_OF_A_STEP[tool]
    rows = int(made.recipe.setdefault("per_device_train_batch_size", str(rows)))
    made.recipe["global_batch_size"] = str(rows * int(given.get("gradient_accumulation_steps", max(steps // rows, 1))))
    for key, what in _PER_EPOCH.items():
        if (times := float(given.get(key, -1))) >= 0:
            made.recipe[f"{what}_strategy"] = "no" if times == 0 else "epoch" if times == 1 else "steps"
            share = 1 / (max(times, 1) * float(made.recipe["num_train_epochs"]))
            made.recipe |= {f"{what}_steps": f"{share:.6g}"} if times > 1 else {}
    for what in ("eval", "save"):  # elsewhere steps are the default
        if f"{what}_steps" in made.recipe:
            made.recipe.setdefault(f"{what}_strategy", "steps")
    if made.recipe.get("eval_strategy", "epoch") != made.recipe.get("save_strategy", "epoch"):
        made.recipe.setdefault("load_best_model_at_end", "false")
    if tool == "ms-swift" and made.recipe["method"] == "full" and "learning_rate" not in given:
        made.recipe["learning_rate"] = "1e-5"
    if tool == "LLaMA-Factory":
        made.recipe.setdefault("lora_alpha", str(2 * int(made.recipe["lora_r"])))
    return made


def _translate_key(key: str, value: Any, made: Translation) -> None:
    """Add what one key says, or why it is left out."""
    tables = _tables()
    name = tables["same"].get(key, key)
    here, note = aliases().get(key, ("" if key not in flags_of("chat") else key, ""))
    reason = tables["why"].get(name, note or _NO_FLAG)
    if name in tables["values"]:
        values = tables["values"][name]
        found = values.get(str(value).lower(), values.get("*"))
        if found is None:
            made.left[key] = reason
        elif found.get("method") != "lora" or made.recipe.get("method") != "qlora":
            made.recipe |= found
    elif not here or (here == "validation_split" and float(value) >= 1):
        made.left[key] = reason if not here else "It is a number of rows, and --validation_split is a share."
    elif here == "lora_target_modules" and isinstance(value, str):
        made.recipe[here] = "all-linear" if value in ("all", "all-linear") else [*map(str.strip, value.split(","))]
    else:
        made.recipe[here] = value


def _add_rows(given: Mapping[str, Any], made: Translation) -> None:
    """Add the files or the dataset of the Hub that hold the rows."""
    for key in (each for each in _OF_ROWS if each in given and each != "dataset_dir"):
        role = "validation" if key in ("test_datasets", "val_dataset", "eval_dataset") else "train"
        held = given[key]
        if isinstance(held, Mapping):  # dataset_mixture
            made.left |= {f"{key}.{name}": _NO_FLAG for name in held if name != "datasets"}
            held = held.get("datasets", [])
        held = held.split(",") if isinstance(held, str) else held
        entries = [each if isinstance(each, Mapping) else {"path": str(each).strip()} for each in held]
        if made.tool == "LLaMA-Factory":
            entries = [_registered(each["path"], Path(given.get("dataset_dir", "data"))) for each in entries]
        _add_entries(key, role, entries, made)


def _registered(name: str, folder: Path) -> dict[str, Any]:
    """The entry of a dataset in the list of LLaMA-Factory; without a path if the list is missing."""
    try:
        entry = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError):
        return {"unknown": f"{folder / 'dataset_info.json'} has no {name}"}
    path = entry.get("hf_hub_url") or str(folder / entry.get("file_name", name))
    return {"path": path, "split": entry.get("split"), "name": entry.get("subset"), "columns": entry.get("columns")}


def _add_entries(key: str, role: str, entries: Sequence[Mapping[str, Any]], made: Translation) -> None:
    files, hub = list[str](), list[Mapping[str, Any]]()
    for each in entries:
        path, _, some = str(each.get("path") or each.get("id") or "").partition("#")
        named = each.get("data_files") or [path]
        if Path(path).suffix in _ENDINGS or _tables()["entries"]["file"] in each:
            files += [named] if isinstance(named, str) else named
        else:
            hub.append({**each, "path": path})
        if some:
            made.left[f"{key} {path}#{some}"] = "All rows are read. Cut the file, or use --max_steps."
        made.left |= {f"{key}.{name}": _BY_NAME for name in each.keys() - _tables()["entries"]["known"]}
        if each.get("type") == "completion":
            made.recipe |= {"task": "clm", "text_column": each.get("field") or "text"}
        held = {"messages": each.get("field_messages")}
        held |= each["columns"] if isinstance(each.get("columns"), Mapping) else {}  # TRL's are a list
        renamed = {_COLUMNS.get(name, name): theirs for name, theirs in held.items()}
        if columns := {ours: theirs for ours, theirs in renamed.items() if theirs not in (None, ours, _SHAREGPT)}:
            made.recipe["columns"] = columns
    unknown = [each["unknown"] for each in hub if "unknown" in each]
    if files and not hub:
        made.recipe[f"{role}_file"] = files
    elif len({each["path"] for each in hub}) == 1 and not files and not unknown and role == "train":
        config = hub[0].get("name") or hub[0].get("config")
        split = "+".join(filter(None, (each.get("split") for each in hub)))
        made.recipe |= {"dataset_name": hub[0]["path"]} | ({"dataset_config_name": config} if config else {})
        made.recipe |= {"dataset_splits": [f"train={split}"]} if split else {}
    else:
        made.left[key] = f"{', '.join(unknown) or 'A run reads files, or one dataset of the Hub'}. Use --{role}_file."
