"""What a model card says, read from the files of the model's folder."""

from __future__ import annotations

import csv
import json
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from indictune.config.recipe import recorded_values
from indictune.credentials import NOT_YAML, without_tokens
from indictune.evaluation.breakdown import Breakdown, read_breakdowns
from indictune.files import BASELINE, EXPORTED, METRICS, RECIPE, REST, json_or_nothing
from indictune.hub.public_text import without_folders
from indictune.models import builtin
from indictune.models.adapters import base_of, config_file, continues_texts
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.shipped_files import strategies

EMISSIONS = "emissions.csv"  # of codecarbon, by --report_to codecarbon
# What is of this machine or of the push, and not of the training.
NOT_OF_THE_TRAINING = (
    *("task", "output_dir", "push_to_hub", "resume_from_checkpoint", "run_name", "logging_dir", "report", "report_to"),
)
_NAMES = ("model_name_or_path", "dataset_name")  # which may be names on the Hub

_TASKS = {"token-classification": "tokens", "text-generation": "chat"}  # `task_of` imports TRL
_TAGS = {"ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification"}


@dataclass(frozen=True)
class Facts:
    """A model's folder, as its card sees it.

    Attributes:
        folder: of the model.
        repository: on the Hub; None if it has none.
        config: content of `config.json`, or of the base's for an adapter on a language model.
        chosen: what the user chose of the recipe.
        settings: the complete configuration of the run.
        metrics: content of `metrics.json`.
        breakdowns: of `evaluation.json`, by the names of the blocks of `metrics.json`.
        baseline: content of `baseline.json`.
    """

    folder: Path
    repository: str | None
    config: dict[str, Any]
    chosen: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, Any]
    breakdowns: dict[str, Breakdown]
    baseline: dict[str, Any]

    @property
    def model(self) -> str:
        """What a program calls the model: its repository, or its folder as seen from the folder around it."""
        return self.repository or self.folder.absolute().name

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter, not a whole model."""
        return (self.folder / ADAPTER_CONFIG).is_file()

    @cached_property
    def exported(self) -> dict[str, Any]:
        """What `indictune export` recorded; empty for a model that transformers reads."""
        return json_or_nothing(self.folder / EXPORTED)

    @cached_property
    def base(self) -> str | None:
        """The Hub's name of the model that the training started from; None for a folder or random weights."""
        name = base_of(self.folder).name if self.is_adapter else str(self.settings.get("model_name_or_path") or "")
        return name if is_hub_name(name) else None

    @property
    def how_it_ran(self) -> dict[str, Any]:
        """How the run was distributed; None for what is not known."""
        metrics = self.metrics
        return {
            "strategy": metrics.get("strategy"),
            "processes (world size)": metrics.get("world_size"),
            "devices": ", ".join(f"{count} x {name}" for name, count in (metrics.get("devices") or {}).items()),
            "precision": metrics.get("dtype"),
            "global batch, in rows": metrics.get("global_batch_size"),
        }

    @property
    def dataset(self) -> str | None:
        """The Hub's name of the dataset."""
        name = str(self.settings.get("dataset_name") or "")
        return name if is_hub_name(name) else None

    @property
    def pipeline_tag(self) -> str | None:
        """The Hub's name of the task; None for one that only the user knows."""
        architectures = self.config.get("architectures") or []
        if continues_texts(architectures):
            return "text-generation"
        found = (tag for name in architectures for head, tag in _TAGS.items() if str(name).endswith(head))
        return next(found, None)

    @property
    def labels(self) -> list[str]:
        """Of a classifier, in the order of their numbers."""
        names: dict[str, str] = self.config.get("id2label") or {}
        has_labels = self.pipeline_tag in _TAGS.values() and self.config.get("problem_type") != "regression"
        return [names[key] for key in sorted(names, key=int)] if has_labels else []

    @property
    def languages(self) -> list[str]:
        """Of all rows that were trained on or evaluated, sorted."""
        counted: dict[str, int] = (self.metrics.get("data") or {}).get("languages") or {}
        evaluated = (self.metrics.get(split) or {} for split in ("eval", "test"))
        return sorted({*counted, *(language for block in evaluated for language in block.get("per_language") or {})})

    @property
    def command(self) -> str:
        """A command that trains such a model again, on files of the same names."""
        words = ["indictune", "train", _TASKS.get(str(self.pipeline_tag), "classification")]
        strategy = self.metrics.get("strategy")
        if strategy in strategies():
            words += ["--strategy", str(strategy), "--num_processes", str(self.metrics.get("world_size"))]
        lines = [shlex.join(words)]
        for name, value in self.chosen.items():
            if name not in NOT_OF_THE_TRAINING and not name.startswith("hub_") and value is not None:
                given = value if isinstance(value, list) else [value]
                lines.append(shlex.join([f"--{name}", *(public_value(name, each) for each in given)]))
        return " \\\n    ".join(lines)

    @property
    def energy(self) -> dict[str, str]:
        """The last line of codecarbon's file; empty without one."""
        with suppress(OSError, ValueError, csv.Error), (self.folder / EMISSIONS).open(encoding="utf-8") as file:
            return list(csv.DictReader(file))[-1]
        return {}


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the Hub, and no folder here nor a model or dataset of the package."""
    if not name or name.startswith(builtin.PREFIX) or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def public_value(name: str, value: Any) -> str:
    """A flag's value as a word of a command, without folders of this machine."""
    if isinstance(value, bool):
        return str(value).lower()
    text = without_tokens(json.dumps(value) if isinstance(value, dict) else str(value))
    is_name = name in _NAMES and (is_hub_name(text) or text.startswith(builtin.PREFIX))
    if is_name or "://" in text or isinstance(value, dict):
        return without_folders(text)
    return text.replace("\\", "/").rpartition("/")[2] or "..."


def facts_of(folder: Path, repository: str | None, run: Path) -> Facts:
    """Read the files of a model and of its run. One that is missing or no JSON or YAML has nothing to say."""
    chosen, whole = "", ""
    with suppress(OSError, UnicodeDecodeError):
        whole = (run / RECIPE).read_text(encoding="utf-8")
        chosen = whole.partition(REST)[0] if REST in whole else ""
    settings = recorded_values(_yaml(whole))
    breakdowns: dict[str, Breakdown] = {}
    with suppress(OSError):
        breakdowns = read_breakdowns(run)
    config, metrics, baseline = map(json_or_nothing, (config_file(folder), run / METRICS, run / BASELINE))
    return Facts(folder, repository, config, _yaml(chosen), settings, metrics, breakdowns, baseline)


def _yaml(text: str) -> dict[str, Any]:
    with suppress(*NOT_YAML):
        content = yaml.safe_load(text)
        return content if isinstance(content, dict) else {}
    return {}
