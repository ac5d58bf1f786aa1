"""What a model card says and its metadata, read from the files of the model's folder."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from indictune.config.command_line import SCRIPTS
from indictune.config.recipe import recorded_values
from indictune.console_text import shown_language
from indictune.credentials import NOT_YAML, without_tokens
from indictune.evaluation.breakdown import RATIOS, SPLITS, Breakdown, Group, read_breakdowns
from indictune.evaluation.uncertainty import Estimate
from indictune.files import BASELINE, EXPORTED, METRICS, RECIPE, REST, json_or_nothing
from indictune.hub.public_text import without_folders
from indictune.models import builtin, fetched
from indictune.models.adapters import base_of, config_file, continues_texts
from indictune.models.task_models import READING_KEY
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.versions import strategies

EMISSIONS = "emissions.csv"  # of codecarbon, by --report_to codecarbon
# Tasks that learn which answers are better, and what they learn from.
PREFERENCES = {
    "dpo": "pairs of a better and a worse answer, by direct preference optimization (DPO)",
    "kto": "answers that are marked good or bad, by Kahneman-Tversky optimization (KTO)",
    "reward": "pairs of a better and a worse answer, to give the better one a higher number",
}
# What is of this machine or of the push, and not of the training.
NOT_OF_THE_TRAINING = ["task", "output_dir", "push_to_hub", "resume_from_checkpoint", "run_name", "logging_dir"]
NOT_OF_THE_TRAINING += ["report", "report_to"]
_NAMES = ("model_name_or_path", "dataset_name", "metrics")  # which may be names on the Hub

_TASKS = {
    "token-classification": "tokens",
    "text-generation": "chat",
    "fill-mask": "mlm",
}  # `task_of` is slow
_LABELLING = {"ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification"}
_TAGS = _LABELLING | {"ForMaskedLM": "fill-mask"}
_TIMEOUT_S = 5.0  # for the licence of the base
# Scores, and the Hub's names of their metrics. Others go by their own names.
_METRICS = {"macro_f1": "f1", "micro_f1": "f1", "pearson": "pearsonr", "spearman": "spearmanr"}
_METRICS |= {"answer_token_accuracy": "accuracy"}
_COUNTS = ["num_examples", "num_tokens", "num_characters", "num_tags", "threshold", "chosen_tokens", "rejected_tokens"]
_COUNTS += ["good_tokens", "bad_tokens"]
_LANGUAGE = re.compile(r"([a-z]{2,3})(?:-[A-Za-z]{4})?")  # ISO 639, alone or before a script: hi, hi-Latn
GROUPS = ("language", "script", "length")  # of which scores are shown, in this order
_NO_LANGUAGE = ("und", "mul", "zxx", "mis")


@dataclass(frozen=True)
class CardFacts:
    """A model's folder, as its card sees it."""

    folder: Path
    repository: str | None
    config: dict[str, Any]  # of `config.json`, or of the base for an adapter on a language model
    chosen: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, Any]
    breakdowns: dict[str, Breakdown]  # by the names of the blocks of `metrics.json`
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
        if name == fetched.NAME and not self.is_adapter:  # an adapter does not fit the weights of the Hub
            return fetched.HUB_NAME
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
    def training_rows(self) -> list[list[str]]:
        """The number of training rows, and that of each language and label; empty if it is unknown."""
        data: Mapping[str, Any] = self.metrics.get("data") or {}
        if "rows" not in data:
            return []
        languages = {shown_language(name): count for name, count in (data.get("languages") or {}).items()}
        counted = [("language", languages), ("label", data.get("labels") or {})]
        body = [[f"{what} {name}", f"{count:,}"] for what, each in counted for name, count in each.items()]
        return [["all", f"{data['rows']:,}"], *body, *([["tags", str(data["tags"])]] if "tags" in data else [])]

    @property
    def learned_pieces(self) -> int:
        """How many entries of the vocabulary were learned from the training rows."""
        if self.settings.get("vocabulary_from_train") is None:
            return 0
        model = json_or_nothing(self.folder / "tokenizer.json").get("model") or {}
        return len(builtin.learned_pieces(model.get("vocab") or {}))

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
        return next((tag for name in architectures for head, tag in _TAGS.items() if str(name).endswith(head)), None)

    @property
    def continues_texts(self) -> bool:
        """Whether a language model learned raw text, and no answers."""
        return self.settings.get("task") == "clm"

    @property
    def preferred_by(self) -> str | None:
        """The task by which a language model learned which answers are better; None for another one."""
        named = self.settings.get("task")
        return named if named in PREFERENCES else None

    @property
    def reading(self) -> dict[str, Any]:
        """How the model reads texts, if otherwise than by cutting single ones: see `note_reading`."""
        found = self.config.get(READING_KEY) or {}
        return {} if "task" in found else found  # of whole conversations

    @property
    def labels(self) -> list[str]:
        """Of a classifier, in the order of their numbers."""
        names: dict[str, str] = self.config.get("id2label") or {}
        has_labels = self.pipeline_tag in _LABELLING.values() and self.config.get("problem_type") != "regression"
        return [names[key] for key in sorted(names, key=int)] if has_labels else []

    @property
    def languages(self) -> list[str]:
        """Of all rows that were trained on or evaluated, sorted."""
        counted: dict[str, int] = (self.metrics.get("data") or {}).get("languages") or {}
        evaluated = (self.metrics.get(split) or {} for split in SPLITS)
        return sorted({*counted, *(language for block in evaluated for language in block.get("per_language") or {})})

    @property
    def command(self) -> str:
        """A command that trains such a model again, on files of the same names."""
        named = self.settings.get("task")
        task = named if named in SCRIPTS else _TASKS.get(str(self.pipeline_tag), "classification")
        words = ["indictune", "train", task]
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
    if not name or name.startswith((builtin.PREFIX, fetched.PREFIX)) or os.path.exists(name):
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
    is_name = name in _NAMES and (is_hub_name(text) or text.startswith((builtin.PREFIX, fetched.PREFIX)))
    if is_name or "://" in text or isinstance(value, dict):
        return without_folders(text)
    return text.replace("\\", "/").rpartition("/")[2] or "..."


def card_facts_of(folder: Path, repository: str | None, run: Path) -> CardFacts:
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
    return CardFacts(folder, repository, config, _yaml(chosen), settings, metrics, breakdowns, baseline)


def _yaml(text: str) -> dict[str, Any]:
    with suppress(*NOT_YAML):
        content = yaml.safe_load(text)
        return content if isinstance(content, dict) else {}
    return {}


def metadata_of(facts: CardFacts) -> ModelCardData:
    """Language, licence, base, datasets, task, library, tags and results, as far as they are known."""
    results = list(results_of(facts))
    task = facts.pipeline_tag
    codes = (_LANGUAGE.fullmatch(language) for language in facts.languages)  # other names have no place here
    return ModelCardData(
        language=sorted({each[1] for each in codes if each is not None and each[1] not in _NO_LANGUAGE}) or None,
        license=facts.settings.get("hub_license") or (facts.base and licence_of(facts.base)),
        base_model=facts.base,
        datasets=[facts.dataset] if facts.dataset else None,
        pipeline_tag=task,
        library_name=facts.exported.get("format") or ("peft" if facts.is_adapter else "transformers"),
        tags=[
            "indictune",
            *(["sft"] if task == "text-generation" and not (facts.continues_texts or facts.preferred_by) else []),
            *([facts.preferred_by] if facts.preferred_by else []),
            *(["lora"] if facts.is_adapter else []),
        ],
        metrics=sorted({each.metric_type for each in results}) or None,
        model_name=re.sub(r"[^\w.-]", "-", facts.model.rpartition("/")[2]),
        eval_results=results or None,
    )


def licence_of(base: str) -> str | None:
    """The licence that the Hub has for the base; None if it has none or does not answer."""
    with suppress(HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError, ValueError):
        tags = HfApi().model_info(base, timeout=_TIMEOUT_S).tags or []
        return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return None


def results_of(facts: CardFacts) -> Iterator[EvalResult]:
    """The results of the test and validation rows: all of them, and each language with a code."""
    task, name = facts.pipeline_tag, facts.dataset or "the rows of the training run"
    if task is None:
        return
    for block_name, split in SPLITS.items():
        block = facts.metrics.get(block_name) or {}
        languages: dict[str, Any] = block.get("per_language") or {}
        coded = [(language, scores) for language, scores in languages.items() if _LANGUAGE.fullmatch(language)]
        for language, scores in ((None, block), *coded):
            for metric, value in scores_in(scores).items():
                yield EvalResult(
                    task_type=task,
                    dataset_type=facts.dataset or "custom",
                    dataset_name=name if language is None else f"{name} ({language})",
                    dataset_config=language,
                    dataset_split=split,
                    metric_type=_METRICS.get(metric, metric),
                    metric_name=metric.replace("_", " "),
                    metric_value=round(value, 6),
                )


def scores_in(block: Mapping[str, Any]) -> dict[str, float]:
    """The finite scores of a block of `metrics.json`, without counts."""
    numbers = {name: float(value) for name, value in block.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if name not in _COUNTS and math.isfinite(value)}


def with_interval(score: Estimate, digits: int) -> str:
    """A score with its 95% interval, if it has one."""
    value, low, high = (f"{each:.{digits}f}" for each in (score.value, score.low, score.high))
    return value if math.isnan(score.low) else f"{value} ({low} to {high})"


def group_cells(group: Group, names: Iterable[str], digits: int) -> list[str]:
    """The number of a group's rows, and its scores; a script has none by `--metrics`."""
    scores = (with_interval(group.scores[name], digits) if name in group.scores else "" for name in names)
    return [f"{group.num_examples:,}", *scores]


def label_rows(group: Group, digits: int) -> list[list[str]]:
    """Each label, or kind of entity, with the number of its rows and its `RATIOS`."""
    return [
        [label, f"{scores.support:,}", *(with_interval(getattr(scores, name), digits) for name in RATIOS)]
        for label, scores in (group.per_label or {}).items()
    ]


def block_rows(block: Mapping[str, Any], digits: int, prefix: str = "") -> tuple[list[str], list[list[str]]]:
    """The names of the scores of a block of `metrics.json`, and rows of a table: of all rows and of each language."""
    names = list(scores_in(block))
    languages: Mapping[str, Any] = block.get("per_language") or {}
    rows = []
    named = ((f"{prefix}{shown_language(language)}", scores) for language, scores in languages.items())
    for of, each in (("all", block), *named):
        scores = scores_in(each)
        cells = (f"{scores[name]:.{digits}f}" if name in scores else "" for name in names)
        rows.append([of, f"{each.get('num_examples', 0):,}", *cells])
    return names, rows
