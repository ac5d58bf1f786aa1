"""Folders of models, as a finished run leaves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LABELS = ("negative", "neutral", "positive")
SCORES = {"accuracy": 0.75, "macro_f1": 0.5}

CONFIG: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "id2label": {str(number): label for number, label in enumerate(LABELS)},
}
METRICS: dict[str, Any] = {
    "strategy": "ddp",
    "world_size": 8,
    "devices": {"NVIDIA A100": 8},
    "dtype": "bfloat16",
    "global_batch_size": 256,
    "train": {"runtime_s": 61.5},
    "data": {
        "rows": 1200,
        "languages": {"hi": 700, "te": 500},
        "labels": {"negative": 1200},
        "notes": ["2 are alike."],
    },
    "versions": {"torch": "2.13.0"},
    "test": {
        "num_examples": 100,
        "loss": 0.25,
        **SCORES,
        "per_language": {"hi": {"num_examples": 60, **SCORES}, "te": {"num_examples": 40, **SCORES, "macro_f1": 0.25}},
    },
}
RECIPE = """\
task: classification
output_dir: /home/me/secret/out
model_name_or_path: ai4bharat/IndicBERTv2-MLM-only
train_file: /home/me/secret/train.csv
global_batch_size: 256

# Not chosen: defaults, and what followed from the run.
learning_rate: 2.0e-05
method: full
seed: 42
"""


def model_folder(
    folder: Path, metrics: dict[str, Any] = METRICS, recipe: str = RECIPE, config: dict[str, Any] = CONFIG
) -> Path:
    """A folder with all but the weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder


def write_weights(folder: Path, value: float = 0) -> bytes:
    """Write the weights of a model, too few for any; returns the content of the file."""
    save_file({"bias": np.full(500, value, np.float32)}, folder / "model.safetensors")
    return (folder / "model.safetensors").read_bytes()


def estimate(value: float) -> dict[str, float]:
    """A score whose interval is 0.1 to each side."""
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def group(macro_f1: float, labels: Sequence[str] = ()) -> dict[str, Any]:
    """Scores of 50 rows in `evaluation.json`."""
    scores = {"precision": estimate(0.8), "recall": estimate(0.4), "f1": estimate(0.6), "support": 25}
    per_label = dict.fromkeys(labels, scores)
    return {"num_examples": 50, "scores": {"macro_f1": estimate(macro_f1)}, "per_label": per_label, "confusion": None}


def write_evaluation(folder: Path, languages: Sequence[str] = ("hi", "te"), labels: Sequence[str] = LABELS) -> None:
    """`evaluation.json` of the test rows. The last language has the worst score."""
    by = {language: group(0.5 - number / 10) for number, language in enumerate(languages)}
    content = {"kind": "single_label", "score": "macro_f1", "lower_is_better": False, "labels": list(labels)}
    content |= {"overall": group(0.5, labels), "by": {"language": by}, "worst_language": languages[-1]}
    content |= {"calibration": {"ece": 0.2, "bins": [], "temperature": 2.0, "calibrated_ece": 0.125}}
    (folder / "evaluation.json").write_text(json.dumps({"test": content}), encoding="utf-8")
