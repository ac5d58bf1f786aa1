"""`--long_text` and `--max_length auto`: what happens to texts that are longer than the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from tokenizers import processors
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.plan import unresolved
from indictune.config.shared_arguments import ClassifierArguments, LongText
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.data.text.tokenisation import usual_length, windows_of
from indictune.errors import Problems
from indictune.models.task_models import note_reading, recorded_reading
from indictune.prediction.served_classifier import Classifier, served_model
from indictune.preflight.values import check_long_texts
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.loss import ExactLoss, mean_at_windows, mean_of_windows
from indictune.tasks.tokens import TokenClassification
from tests.models.tiny import words_tokenizer
from tests.plans import codes
from tests.ranks.launching import Run, accelerate, distance, python, start, train
from tests.refusals import refused

JOB = """
model_name_or_path: builtin:tiny-indic-bert
long_text: window
dropout: 0
max_length: 12
global_batch_size: 12
per_device_train_batch_size: 3
per_device_eval_batch_size: 4
max_steps: 4
learning_rate: 1e-3
lr_scheduler_type: constant
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: 'no'
"""
WORDS = ["good", "great", "bad", "film", "food", "day", "the", "was", "not"]
A, B, C, D = 3, 4, 5, 6  # ids of अच्छा, बुरा, మంచి, చెడు
FIRST, LAST = 11, 12


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """It puts `FIRST` before a text and `LAST` after it."""
    made = words_tokenizer()
    made.add_tokens(["<s>", "</t>"])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </t>", special_tokens=[("<s>", FIRST), ("</t>", LAST)]
    )
    return made


def read(tokenizer: PreTrainedTokenizerBase, max_length: int, text: str, long_text: LongText) -> list[list[int]]:
    """The windows of a text, without the special tokens that each of them has."""
    (windows,) = windows_of(tokenizer, max_length, [text], long_text)([text]).windows
    assert all((ids[0], ids[-1]) == (FIRST, LAST) for ids in windows)
    return [ids[1:-1] for ids in windows]


def test_windows_share_a_quarter_and_the_last_ends_with_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    long = "अच्छा बुरा " * 3 + "మంచి చెడు"
    assert read(tokenizer, 6, long, "window") == [[A, B, A, B], [B, A, B, C], [A, B, C, D]]
    assert read(tokenizer, 6, "अच्छा बुरा మంచి చెడు చెడు", "window") == [[A, B, C, D], [B, C, D, D]]
    assert read(tokenizer, 6, "अच्छा बुरा మంచి చెడు", "window") == [[A, B, C, D]]


def test_head_tail_keeps_both_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    assert read(tokenizer, 6, "अच्छा बुरा బ బ మంచి చెడు", "head_tail") == [[A, B, C, D]]
    assert read(tokenizer, 5, "अच्छा बुरा బ బ మంచి చెడు", "head_tail") == [[A, B, D]]
    assert read(tokenizer, 6, "अच्छा", "head_tail") == [[A]]


def test_truncate_reads_as_the_tokenizer_cuts(tokenizer: PreTrainedTokenizerBase) -> None:
    assert read(tokenizer, 5, "अच्छा बुरा మంచి చెడు", "truncate") == [[A, B, C]]


def test_a_limit_without_room_for_the_text_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with refused("no-room-for-text", flag="--max_length"):
        windows_of(tokenizer, 2, ["ok"], "window")


def test_a_tokenizer_with_special_tokens_inside_a_text_is_refused() -> None:
    class Between:
        name_or_path = "some/model"

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, 9, 2] if add_special_tokens else [1, 2]}

        is_fast = False

    between: Any = Between()
    with refused("long-text-impossible", "some/model", flag="--long_text"):
        windows_of(between, 5, ["ok"], "window")


def test_a_row_s_logits_are_the_mean_over_its_windows() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 1.0], [0.0, 1.0], [0.0, 2.0], [0.0, 6.0]])
    expected = [[2.0, 2.0], [7.0, 1.0], [0.0, 3.0]]
    assert mean_of_windows(logits, torch.tensor([2, 1, 3])).tolist() == expected
    at_windows = mean_at_windows(logits, torch.tensor([0, -100, 1, 1, -100, -100]))
    assert at_windows[[0, 2, 3]].tolist() == expected
    several = torch.tensor([[1, 0], [-100, -100], [0, 0], [1, 1], [-100, -100], [-100, -100]])
    assert torch.equal(mean_at_windows(logits, several), at_windows)


def test_the_loss_of_windows_is_that_of_their_mean() -> None:
    logits = torch.tensor([[5.0, 0.0], [-1.0, 2.0], [0.0, 3.0]])
    labels, outputs = torch.tensor([1, -100, 0]), SequenceClassifierOutput(logits=logits)
    loss = ExactLoss()
    loss.of_windows = True
    expected = functional.cross_entropy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([1, 0]))
    assert loss(outputs, labels, torch.tensor(2)).item() == pytest.approx(expected.item(), abs=1e-6)


ROWS: list[Row] = [
    {"input_ids": np.array([11, 3, 12, 11, 4, 5, 12]), "labels": 1, "seq_lengths": np.array([3, 4]), "row": 5},
    {"input_ids": np.array([11, 12]), "labels": 0, "seq_lengths": np.array([2]), "row": 0},
]


def test_each_window_is_a_sequence_and_the_first_has_the_label() -> None:
    padded, joined = PadToLongest(0, "right")(ROWS), JoinRows(labels_of_tokens=False)(ROWS)
    assert padded["input_ids"].tolist() == [[11, 3, 12, 0], [11, 4, 5, 12], [11, 12, 0, 0]]
    assert padded["labels"].tolist() == joined["labels"].tolist() == [1, -100, 0]
    assert joined["cu_seq_lens_q"].tolist() == [0, 3, 7, 9]
    evaluated = PadToLongest(0, "right", with_row_numbers=True)(ROWS)
    assert [evaluated[name].tolist() for name in ("row_numbers", "labels", "windows")] == [[5, 0], [1, 0], [2, 1]]


@pytest.mark.more
def test_auto_is_the_99th_percentile_within_the_positions(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = pa.chunked_array([["अच्छा " * words for words in range(1, 101)], ["अच्छा " * 400]])
    assert usual_length(texts, tokenizer, None) == 102  # the 100 words of the last but one, and two special tokens
    assert usual_length(texts, tokenizer, 64) == 64
    assert usual_length(pa.chunked_array([["अच्छा"] * 60_000]), tokenizer, 64) == 3
    sentences = pa.chunked_array([[["अच्छा"] * words for words in range(1, 1001)]])
    assert [usual_length(sentences, tokenizer, None, share) for share in (99, 99.5)] == [993, 998]


def test_other_tasks_refuse_what_is_for_labels_of_texts() -> None:
    given = unresolved(DataArguments, {"long_text": "window", "max_length": "auto"})
    code = "long-text-of-another-task"
    assert codes(check_long_texts(given, TokenClassification())) == [(code, "--long_text")]
    assert codes(check_long_texts(given, Chat())) == [(code, "--long_text"), (code, "--max_length")]
    assert check_long_texts(given, Classification()) == []
    assert check_long_texts(unresolved(ChatDataArguments, {}), Chat()) == []


def test_a_model_that_is_trained_again_on_cut_texts_forgets_its_windows() -> None:
    config = BertConfig()
    note_reading(config, unresolved(DataArguments, {"long_text": "window", "max_length": 12}))
    assert recorded_reading(config) == {"long_text": "window", "max_length": 12}
    note_reading(config, unresolved(DataArguments, {"max_length": 12}))
    assert recorded_reading(config) == {}


def rows(count: int, offset: int) -> list[dict[str, str]]:
    """Texts of 3 to 41 words. The last word says the label, so a cut text does not."""
    made = []
    for number in range(offset, offset + count):
        words = [WORDS[(number + place * place) % 9] for place in range(2 + number * 7 % 39)]
        text = " ".join([*words, ["good", "bad"][number % 2]])
        made.append({"text": text, "label": ["pos", "neg"][number % 2], "language": "en"})
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    for name, made in {"train": rows(41, 0), "validation": rows(23, 100)}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, made)), encoding="utf-8")
    files = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    lines = "".join(f"{name}: {json.dumps(file)}\n" for name, file in files.items())
    (folder / "job.yaml").write_text(JOB + lines, encoding="utf-8")
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def alone(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(python(), tmp_path_factory.mktemp("alone"), "--config", str(job))


PADDED = ["--padding_free", "off", "--max_tokens_per_device", "400"]


@pytest.mark.more
@pytest.mark.parametrize("flags", [[], pytest.param(PADDED, marks=pytest.mark.more)])
def test_two_ranks_train_on_windows_as_one_does(job: Path, alone: Run, tmp_path: Path, flags: list[str]) -> None:
    both = train(accelerate("ddp", 2), tmp_path / "out", "--config", str(job), *flags)
    assert both.series("loss") == pytest.approx(alone.series("loss"), abs=1e-5)
    assert both.series("grad_norm") == pytest.approx(alone.series("grad_norm"), rel=1e-3)
    assert distance(both.weights, alone.weights) < 1e-3
    assert both.metrics["eval"]["loss"] == pytest.approx(alone.metrics["eval"]["loss"], abs=1e-5)
    assert both.metrics["eval"]["num_examples"] == 23


@pytest.fixture(scope="module")
def expected(alone: Run) -> torch.Tensor:
    """The mean logits of each validation text, worked out with plain transformers, window by window; [23, 2]."""
    model = AutoModelForSequenceClassification.from_pretrained(alone.folder).eval()
    tokenizer, logits = AutoTokenizer.from_pretrained(alone.folder), []
    for row in rows(23, 100):
        ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        starts = [*range(0, len(ids) - 10, 8), len(ids) - 10] if len(ids) > 10 else [0]
        parts = [[tokenizer.cls_token_id, *ids[begin : begin + 10], tokenizer.sep_token_id] for begin in starts]
        with torch.no_grad():
            logits.append(torch.stack([model(torch.tensor([part])).logits[0] for part in parts]).mean(0))
    return torch.stack(logits)


def test_the_score_is_that_of_each_text_s_mean_logits(alone: Run, expected: torch.Tensor) -> None:
    labels = torch.tensor([["neg", "pos"].index(row["label"]) for row in rows(23, 100)])
    assert max(len(row["text"].split()) for row in rows(23, 100)) > 30  # some have several windows
    loss = functional.cross_entropy(expected, labels).item()
    assert alone.metrics["eval"]["loss"] == pytest.approx(loss, abs=1e-5)


def test_predict_reads_in_windows_as_the_run_did(alone: Run, expected: torch.Tensor) -> None:
    served = served_model(ClassifierArguments(model=str(alone.folder)), Problems())
    assert served is not None
    logits = Classifier(served).logits([row["text"] for row in rows(23, 100)])
    assert np.abs(logits - expected.numpy()).max() < 1e-5


def test_the_first_loss_is_that_of_each_row_once(job: Path, alone: Run, tmp_path: Path) -> None:
    """A step of a learning rate of 0 on all rows at once has the loss of an evaluation of these rows."""
    flags = ["--global_batch_size", "41", "--per_device_train_batch_size", "41", "--max_steps", "1"]
    files = ["--train_file", str(job.parent / "train.jsonl"), "--validation_file", str(job.parent / "train.jsonl")]
    still = train(python(), tmp_path / "out", "--config", str(job), *flags, *files, "--learning_rate", "0")
    assert still.series("loss")[0] == pytest.approx(still.metrics["eval"]["loss"], abs=1e-5)


def test_evaluate_reads_in_windows_as_the_run_did(job: Path, alone: Run, tmp_path: Path) -> None:
    flags = ["--model", str(alone.folder), "--test_file", str(job.parent / "validation.jsonl"), "--output_dir"]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags, str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path / "out").metrics["test"]["loss"] == pytest.approx(alone.metrics["eval"]["loss"], abs=1e-6)


def test_auto_is_recorded_with_the_number_it_found(job: Path, tmp_path: Path) -> None:
    flags = ["--max_length", "auto", "--long_text", "head_tail", "--max_steps", "1"]
    made = train(python(), tmp_path / "out", "--config", str(job), *flags)
    recipe = yaml.safe_load((made.folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert (recipe["max_length"], recipe["decided"]["max_length"]) == ("auto", 74)
    config = json.loads((made.folder / "config.json").read_text(encoding="utf-8"))
    assert config["text_reading"] == {"long_text": "head_tail", "max_length": 74}
