"""The metadata of a model card: what the Hub searches by, and the measured results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx2
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from indictune.evaluation.breakdown import SPLITS
from indictune.hub.card_facts import Facts

_TIMEOUT_S = 5.0  # for the licence of the base
# Scores, and the Hub's names of their metrics. Others go by their own names.
_METRICS = {"macro_f1": "f1", "micro_f1": "f1", "pearson": "pearsonr", "spearman": "spearmanr"}
_METRICS |= {"answer_token_accuracy": "accuracy"}
_COUNTS = ("num_examples", "num_tokens", "num_tags", "threshold")
_LANGUAGE = re.compile(r"([a-z]{2,3})(?:-[A-Za-z]{4})?")  # ISO 639, alone or before a script: hi, hi-Latn
_NO_LANGUAGE = ("und", "mul", "zxx", "mis")


def metadata_of(facts: Facts) -> ModelCardData:
    """Language, licence, base, datasets, task, library, tags and results, as far as they are known."""
    results = list(results_of(facts))
    task = facts.pipeline_tag
    return ModelCardData(
        language=language_codes(facts) or None,
        license=facts.settings.get("hub_license") or licence_of(facts.base),
        base_model=facts.base,
        datasets=[facts.dataset] if facts.dataset else None,
        pipeline_tag=task,
        library_name=facts.exported.get("format") or ("peft" if facts.is_adapter else "transformers"),
        tags=["indictune", *(["sft"] if task == "text-generation" else []), *(["lora"] if facts.is_adapter else [])],
        metrics=sorted({each.metric_type for each in results}) or None,
        model_name=re.sub(r"[^\w.-]", "-", facts.model.rpartition("/")[2]),
        eval_results=results or None,
    )


def language_codes(facts: Facts) -> list[str]:
    """The languages of the rows by their ISO 639 code. Other names of languages have no place in the metadata."""
    found = (_LANGUAGE.fullmatch(language) for language in facts.languages)
    return sorted({each[1] for each in found if each is not None and each[1] not in _NO_LANGUAGE})


def licence_of(base: str | None) -> str | None:
    """The licence that the Hub has for the base; None if it has none or does not answer."""
    if base is None:
        return None
    with suppress(HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError, ValueError):
        tags = HfApi().model_info(base, timeout=_TIMEOUT_S).tags or []
        return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return None


def results_of(facts: Facts) -> Iterator[EvalResult]:
    """The results of the test and validation rows: all of them, and each language with a code."""
    task, name = facts.pipeline_tag, facts.dataset or "the rows of the training run"
    if task is None:
        return
    for block_name, split in SPLITS.items():
        block = facts.metrics.get(block_name) or {}
        languages: dict[str, Any] = block.get("per_language") or {}
        coded = [(language, scores) for language, scores in languages.items() if _LANGUAGE.fullmatch(language)]
        for language, scores in ((None, block), *coded):
            for metric, value in scores_in(scores):
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


def scores_in(block: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The finite scores of a block of `metrics.json`, without counts."""
    numbers = [(name, value) for name, value in block.items() if isinstance(value, (int, float))]
    return [(name, float(value)) for name, value in numbers if name not in _COUNTS and math.isfinite(value)]
