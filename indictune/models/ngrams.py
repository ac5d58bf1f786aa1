"""The baseline as a model of transformers: TF-IDF of character n-grams, and the logistic regression on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from indictune.files import BASELINE_TYPE

_VOCABULARY = "vocab.json"
_PADDING, _START = "<padding>", "<start>"  # the second is in each row: one without known n-grams has a token too
_NEVER = -1e4  # the logit of a label that no row had


def ngram_learner() -> tuple[Any, Any]:
    """TF-IDF of character n-grams, 2 to 5 within words, and the logistic regression on it; neither has learned yet."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import
    from sklearn.linear_model import LogisticRegression

    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=2, dtype=np.float32)
    return ngrams, LogisticRegression(max_iter=1_000, tol=1e-3)


class NgramConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """How many n-grams the model knows; the labels are those of every classifier."""

    model_type = BASELINE_TYPE
    vocab_size: int = 2


class NgramTokenizer(PreTrainedTokenizer):
    """The known n-grams of a text as tokens. `vocab_file` numbers them."""

    vocab_files_names = {"vocab_file": _VOCABULARY}  # noqa: RUF012, as in transformers
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **settings: Any) -> None:
        self._numbers: dict[str, int] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        self._names: list[str] = [*self._numbers]
        self._ngrams_of = ngram_learner()[0].build_analyzer()
        given = {"pad_token": _PADDING, "cls_token": _START, "split_special_tokens": True}
        super().__init__(**{**settings, **given})  # type: ignore[no-untyped-call]

    @property
    def vocab_size(self) -> int:
        return len(self._numbers)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._numbers)

    def tokenize(self, text: str, **_: Any) -> list[str]:  # type: ignore[override]
        """The n-grams; those of other texts than the training's are left out."""
        return [each for each in self._ngrams_of(text) if each in self._numbers]

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: Any = None) -> list[int]:
        return [self._numbers[_START], *token_ids_0]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory, _VOCABULARY)
        path.write_text(json.dumps(self._numbers, ensure_ascii=False), encoding="utf-8")
        return (str(path),)


class NgramsForSequenceClassification(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The logits of a logistic regression on the TF-IDF of the n-grams of a text."""

    config_class = NgramConfig

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config)
        widths = len(config.id2label or ()), 1  # weights of the regression, and the idf, in a list as FSDP shards it
        self.tables = nn.ModuleList(nn.Embedding(config.vocab_size, width) for width in widths)
        self.bias = nn.Parameter(torch.zeros(widths[0]))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.tables[0]

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SequenceClassifierOutput:
        """Logits [rows, labels] of n-grams [rows, tokens], padded; the idf of padding is 0."""
        size, rows = self.config.vocab_size, len(input_ids)
        numbered = input_ids + size * torch.arange(rows, device=input_ids.device)[:, None]
        found, counts = numbered.unique(return_counts=True)
        row_of, ngram = found // size, found % size
        values = (1 + counts.log()) * self.tables[1](ngram)[:, 0]
        lengths = values.new_zeros(rows).index_add(0, row_of, values.square()).sqrt()
        summed = values.new_zeros(rows, len(self.bias)).index_add(0, row_of, values[:, None] * self.tables[0](ngram))
        return SequenceClassifierOutput(logits=summed / lengths.clamp(min=1e-12)[:, None] + self.bias)


AutoConfig.register(NgramConfig.model_type, NgramConfig)
AutoTokenizer.register(NgramConfig, slow_tokenizer_class=NgramTokenizer)  # type: ignore[no-untyped-call]
AutoModelForSequenceClassification.register(NgramConfig, NgramsForSequenceClassification)


def save_ngrams(ngrams: Any, regression: Any, labels: Sequence[str], folder: Path) -> None:
    """Write what `ngram_learner` has learned of single texts to a folder; `labels` are the names by class id."""
    names = sorted(ngrams.vocabulary_, key=ngrams.vocabulary_.get)
    config = NgramConfig(vocab_size=len(names) + 2, id2label=dict(enumerate(labels)))
    config.label2id = {name: number for number, name in enumerate(labels)}
    config.problem_type = "single_label_classification"
    model = NgramsForSequenceClassification(config)
    coefficients, intercepts = regression.coef_, regression.intercept_
    if len(coefficients) == 1:  # of two labels
        coefficients, intercepts = (np.concatenate([0 * each, each]) for each in (coefficients, intercepts))
    with torch.no_grad():
        bias, weights, idf = model.parameters()
        bias.fill_(_NEVER)[regression.classes_] = torch.from_numpy(intercepts).float()
        weights.zero_()[2:, regression.classes_] = torch.from_numpy(coefficients.T).float()
        idf.zero_()[2:, 0] = torch.from_numpy(ngrams.idf_).float()
    model.save_pretrained(folder)
    numbers = {name: number for number, name in enumerate([_PADDING, _START, *names])}
    (folder / _VOCABULARY).write_text(json.dumps(numbers, ensure_ascii=False), encoding="utf-8")
    NgramTokenizer(str(folder / _VOCABULARY)).save_pretrained(folder)
