"""A text classifier on a page. `model/` has its files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import pipeline

from indictune.data.languages import language_of
from indictune.serving.gradio_pages import SERVER, Answer, Classify, classifier_page


def classifying(folder: Path) -> Classify:
    """Labels a text, or two, cleaned and cut as in training. A score that is no number: `ValueError`."""
    run: Any = pipeline("text-classification", str(folder), top_k=None)
    kind = run.model.config.problem_type
    threshold = getattr(run.model.config, "threshold", 0.5)

    def classify(*texts: str) -> Answer:
        language = language_of(" ".join(texts))
        if not all(map(str.strip, texts)):
            return Answer("", None, language)
        given = dict(zip(("text", "text_pair"), texts, strict=False))
        scores = {each["label"]: float(each["score"]) for each in run([given], truncation=True)[0]}
        if not all(map(math.isfinite, scores.values())):
            raise ValueError(f"{folder} gives scores that are no numbers: its weights are broken.")
        if kind == "regression":
            return Answer(f"{next(iter(scores.values())):.4g}", None, language)
        if kind == "multi_label_classification":
            return Answer(", ".join(name for name in scores if scores[name] >= threshold) or "none", scores, language)
        return Answer(max(scores, key=scores.__getitem__), scores, language)

    return classify


def reads_pairs(folder: Path) -> bool:
    """Whether the model was trained on pairs of texts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "text_pair_column" in (config.get("text_reading") or {})


if __name__ == "__main__":
    model = Path(__file__).with_name("model")
    classifier_page("TITLE", classifying(model), reads_pairs(model)).launch(**SERVER)
