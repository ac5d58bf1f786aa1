"""Recipes of axolotl, LLaMA-Factory, ms-swift and TRL, known by their keys and translated key by key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from indictune.config.command_line import aliases, flags_of
from indictune.errors import Problem, UserError, problem

_NO_FLAG = "There is no such flag here."
_CERTAIN = {"use_peft", "gradient_accumulation_steps"}  # one of these is enough
_OURS = {"task", "method", "global_batch_size", "train_file", "train_files", "text_column", "label_column"}
_OF_ROWS = {"datasets": "train", "dataset": "train", "dataset_mixture": "train"}
_OF_ROWS |= {"test_datasets": "validation", "val_dataset": "validation", "eval_dataset": "validation"}
_OF_SPLITS = {"dataset_train_split": "train", "dataset_test_split": "validation"}  # of TRL
_WITH_NOTE = {"max_length", "warmup_steps", "validation_split"}  # their values are the same, whatever the note says
_QUOTED = re.compile(r"(?m)^(\w+: |- )'(-?\.?\d[-+.\deE]*|true|false)'$")  # without need
_ENDINGS = {".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt", ".gz", ".zst"}  # of files of rows


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files("indictune.config").joinpath("foreign.toml").read_text(encoding="utf-8"))


def tool_of(content: Mapping[str, Any]) -> str | None:
    """The tool whose recipe this is; None for one of ours, whose keys may have typing errors."""
    keys = content.keys() - flags_of("chat").keys()
    marks = {tool: len(keys & {*names}) for tool, names in _tables()["marks"].items()}
    tool = max(marks, key=lambda each: marks[each])  # TRL, the first, of none
    is_foreign = marks[tool] > 1 or bool(_CERTAIN & content.keys())
    return tool if is_foreign and not _OURS & content.keys() else None


@dataclass
class Translation:
    """A recipe of ours that does what one of another tool did, and why each of the other keys was left out."""

    tool: str
    recipe: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    refused: list[Problem] = field(default_factory=list)

    def text(self, source: Path) -> str:
        """The recipe as a file."""
        head = f"# Made of {source.name}, a recipe of {self.tool}. global_batch_size is that of one GPU."
        left = [f"# {key} was left out: {reason}" for key, reason in self.left.items()]
        body = yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True)
        return "\n".join([head, *left, _QUOTED.sub(r"\1\2", body)])

    def counterpart(self, key: str, value: Any, shown: str) -> dict[str, Any]:
        """What a key, shown by a longer name, says in our words: nothing if it is left out or refused."""
        tables = _tables()
        name = tables["same"].get(key, key)
        here, note = aliases().get(key, (key if key in flags_of("chat") else "", ""))
        why, is_refused = tables["why"].get(name), bool({key, name} & {*tables["refused"]})
        if key in _OF_SPLITS:
            return {_OF_SPLITS[key]: [value]}
        if name in tables["values"] or is_refused:
            values = tables["values"].get(name, {})
            word = ", ".join(map(str, value)) if isinstance(value, list) else str(value).lower()
            found: dict[str, Any] | None = values.get(word, {} if word == "false" else values.get("*"))
            if found is not None:
                return found
            if is_refused:
                why = why or (None if values else "Leave it out to train without it.")
                known = " or ".join(values)
                self.refused.append(problem("no-such-name", shown, word, why, kind="way of training", known=known))
                return {}
        elif here == "text_column":  # of which TRL's default is for any rows
            return {} if value == "text" else {"task": "clm", here: value}
        elif here == "lora_target_modules" and isinstance(value, str):
            return {here: "all-linear" if value in ("all", "all-linear") else [*map(str.strip, value.split(","))]}
        elif here == "validation_split" and float(value) >= 1:
            why = "It is a number of rows, and --validation_split is a share."
        elif here and not {name, here} & {*tables["left"]} and (not note or here in _WITH_NOTE):
            return {here: value}
        self.left[shown] = why or note or _NO_FLAG
        return {}


def translate(content: Mapping[str, Any], tool: str) -> Translation:
    """What a recipe of that tool says, in our words; a `UserError` if no run here learns the same."""
    given = {str(key): value for key, value in content.items() if value not in (None, "", [], {})}
    if "warmup_ratio" in given and float(given.get("warmup_steps", 1)) == 0:  # in transformers the ratio counts
        del given["warmup_steps"]
    defaults, ours = _tables()["defaults"], flags_of("chat")
    made, said = Translation(tool, {"task": "chat", **defaults["all"], **defaults[tool]}), dict[str, str]()
    keys = [key for key in given if key not in {*_OF_ROWS, "dataset_dir", "gradient_accumulation_steps"}]
    for key in sorted(keys, key=lambda each: each not in ours):  # what has our name counts
        for name, value in made.counterpart(key, given[key], key).items():
            if name in said and made.recipe[name] != value:
                made.left[key] = f"{said[name]} counts."
            else:
                made.recipe[name], said[name] = value, key
    _add_rows(given, made)
    _complete(given, made, said)
    if made.refused:
        raise UserError(problems=made.refused)
    return made


def _complete(given: Mapping[str, Any], made: Translation, said: Mapping[str, str]) -> None:
    """Add what follows from several keys, and take away what the task or the method lacks."""
    recipe, rows = made.recipe, int(made.recipe["per_device_train_batch_size"])
    steps = max(16 // rows, 1) if made.tool == "ms-swift" else 1
    recipe["global_batch_size"] = str(rows * int(given.get("gradient_accumulation_steps", steps)))
    if recipe.pop("bits", None):
        recipe["method"] = "qlora"
    for what in [each for each in ("eval", "save") if f"{each}_steps" in recipe]:  # steps are the default elsewhere
        recipe.setdefault(f"{what}_strategy", "steps")
    is_full = recipe.get("method", "full") == "full"
    if made.tool == "ms-swift" and is_full and "learning_rate" not in said:
        recipe["learning_rate"] = "1e-5"
    if made.tool == "LLaMA-Factory":
        recipe.setdefault("lora_alpha", str(2 * int(recipe["lora_r"])))
        if recipe["task"] == "clm":
            recipe["text_column"] = recipe.get("columns", {}).get("instruction", "instruction")
    parts = {role: "+".join(recipe.pop(role)) for role in ("train", "validation") if role in recipe}
    if parts and parts != {"train": "train"}:
        recipe["dataset_splits"] = [f"{role}={part}" for role, part in ({"train": "train"} | parts).items()]
    of_adapter = {name for name in recipe if name.startswith("lora_") and is_full}
    for name in [each for each in recipe if each in of_adapter or each not in flags_of(recipe["task"])]:
        del recipe[name]
        if name in said:
            made.left[said[name]] = f"It has no effect on {'all weights' if name in of_adapter else 'raw text'}."


def _add_rows(given: Mapping[str, Any], made: Translation) -> None:
    """Add the files, or the dataset of the Hub, of the first entry and of all that are like it."""
    first: dict[str, Any] | None = None
    parts, columns = dict[str, list[str]](), set[str]()
    for key, role in _OF_ROWS.items():
        for entry in _entries(key, given, made):
            path, files, like = _read_entry(key, entry, made)
            first = like if first is None and path else first
            columns |= {*entry.get("columns", ())}
            config, split = entry.get("name") or entry.get("config"), entry.get("split") or "train"
            if like != first:
                what = entry.get("unknown", "A run reads files, or one dataset of the Hub, all of one form")
                shown = " ".join(filter(None, (key, path, config)))
                made.left[shown] = f"{what}, so these rows were left out. Use --{role}_file."
            elif files:
                parts[f"{role}_file"] = parts.get(f"{role}_file", []) + files
            else:
                parts[role] = [*parts.get(role, []), f"{config}/{split}" if config else split]
    for name in made.recipe.keys() & {"dataset_name", "dataset_config_name"} if parts else ():
        made.left[name] = "The entries count."
        del made.recipe[name]
    made.recipe |= (first or {}) | parts
    if columns == {"text"}:
        made.recipe |= {"task": "clm", "text_column": "text"}
    if made.tool == "TRL" and made.recipe["task"] == "chat" and "completion_only_loss" not in given:
        if "completion" in columns:
            made.recipe["train_on_prompts"] = "false"
        elif not columns and made.recipe["train_on_prompts"] == "true":
            made.left["completion_only_loss"] = _tables()["why"]["completion_only_loss"]


def _entries(key: str, given: Mapping[str, Any], made: Translation) -> Iterator[Mapping[str, Any]]:
    """The entries of a key that names rows."""
    held = given.get(key, [])
    if isinstance(held, Mapping):  # dataset_mixture
        made.left |= {f"{key}.{name}": _NO_FLAG for name in held if name != "datasets"}
        held = held.get("datasets", [])
    list_of_all = Path(given.get("dataset_dir", "data"), "dataset_info.json")
    for each in held.split(",") if isinstance(held, str) else held:
        entry = each if isinstance(each, Mapping) else {"path": each.strip()}
        if made.tool == "LLaMA-Factory":
            try:
                entry = json.loads(list_of_all.read_text(encoding="utf-8"))[entry["path"]]
                path = entry.get("hf_hub_url") or str(list_of_all.with_name(entry["file_name"]))
                entry = {"path": path, "name": entry.get("subset"), **entry}
            except (OSError, ValueError, KeyError):
                entry = {"unknown": f"{list_of_all} has no {entry.get('path')}"}
        yield {name: value for name, value in entry.items() if value not in (None, "", [], {})}


def _read_entry(key: str, entry: Mapping[str, Any], made: Translation) -> tuple[str, list[str], dict[str, Any]]:
    """Its path, its files if it is none of the Hub, and what all entries of a run must have in common."""
    tables = _tables()
    path, _, some = str(entry.get("path") or entry.get("id") or "").partition("#")
    named = entry.get("data_files", path)
    is_file = Path(path).suffix in _ENDINGS or tables["file"] in entry or ("data_files" in entry and "/" not in path)
    files = ([named] if isinstance(named, str) else [*named]) if is_file else []
    like: dict[str, Any] = {} if files else {"dataset_name": path}
    if some:
        made.left[f"{key} {path}#{some}"] = tables["why"]["num_samples"]
    for name in [each for each in entry if each not in tables["read"] and (each != "data_files" or not files)]:
        like |= made.counterpart(name, entry[name], f"{key}.{name}")
    if like.get("task") == "clm":
        like["text_column"] = entry.get("field", "text")
    given = {"messages": entry.get("field_messages")}
    given |= entry["columns"] if isinstance(entry.get("columns"), Mapping) else {}  # TRL's are a list
    made.left |= {f"{key}.columns.{name}": _NO_FLAG for name in given.keys() - tables["columns"].keys()}
    renamed = {ours: given.get(theirs) for theirs, ours in tables["columns"].items()}
    columns = {ours: theirs for ours, theirs in renamed.items() if theirs not in (None, ours, "conversations")}
    return path, files, like | ({"columns": columns} if columns else {})
