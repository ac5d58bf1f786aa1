"""`--vocabulary_from_train`: the small encoder learns its word pieces from the run's own texts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from indictune.config.arguments import ModelArguments
from indictune.models.builtin import learn_vocabulary, learned_pieces
from indictune.models.load import load_tokenizer
from indictune.models.task_models import check_learned_vocabulary, with_vocabulary
from tests.plans import codes
from tests.ranks.launching import SCRIPT, Run, accelerate, python, start, train
from tests.refusals import refused

SMALL = ModelArguments(vocabulary_from_train=2_000)
TEXTS = [f"{text} {end}" for text in ("ಚಿತ್ರ ಚೆನ್ನಾಗಿದೆ", "ಕಥೆ ಚೆನ್ನಾಗಿಲ್ಲ", "Chitra chennagide") for end in "abcde"]
WORDS = ["ಚಿತ್ರ", "ಚೆನ್ನಾಗಿದೆ", "ಕಥೆ", "ಚೆನ್ನಾಗಿಲ್ಲ", "oota", "super", "bejaar", "😍"]
JOB = """
model_name_or_path: builtin:tiny-indic-bert
vocabulary_from_train: 2000
dropout: 0
global_batch_size: 12
per_device_train_batch_size: 6
learning_rate: 1e-3
lr_scheduler_type: constant
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: steps
save_steps: 2
"""

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [{"text": f"{WORDS[n % 8]} {WORDS[n * 3 % 7]} {WORDS[n % 5]}", "label": n % 8 > 3} for n in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "job.yaml").write_text(f"{JOB}train_file: {json.dumps(str(folder / 'train.jsonl'))}\n", encoding="utf-8")
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def whole(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps on one process."""
    return train(python(), tmp_path_factory.mktemp("whole"), "--config", str(job), "--max_steps", "4")


def vocabulary(run: Run) -> dict[str, int]:
    return dict(json.loads((run.folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])


@pytest.mark.more
def test_words_of_the_training_texts_are_entries(whole: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole.folder)
    assert tokenizer.tokenize("ಚಿತ್ರ ಚೆನ್ನಾಗಿದೆ BEJAAR") == ["ಚಿತ್ರ", "ಚೆನ್ನಾಗಿದೆ", "bejaar"]
    assert load_tokenizer(ModelArguments()).tokenize("ಚಿತ್ರ") == ["[UNK]"]
    assert len(whole.weights["bert.embeddings.word_embeddings.weight"]) == len(tokenizer) <= 2_000
    pieces = len(learned_pieces(tokenizer.get_vocab()))
    assert f" {pieces} pieces " in (whole.folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.more
def test_two_ranks_train_with_the_vocabulary_that_one_learns(
    job: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))  # empty: nothing is left from the first run
    both = train(accelerate("ddp", 2), tmp_path / "out", "--config", str(job), "--max_steps", "4")
    assert vocabulary(both) == vocabulary(whole)
    assert both.series("loss") == pytest.approx(whole.series("loss"), abs=1e-5)


@pytest.mark.more
def test_a_resumed_run_keeps_the_vocabulary_of_its_checkpoint(
    job: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "metrics.json").unlink()  # as if it had been killed after step 2
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    flags = ["--max_steps", "4", "--resume_from_checkpoint", "auto", "--output_dir", str(folder)]
    resumed = start([*python(), SCRIPT, "--config", str(job), *flags])
    assert resumed.returncode == 0, resumed.stderr
    assert "vocabulary: " in resumed.stderr
    assert "entries from checkpoint-2" in resumed.stderr
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in Run(folder).weights.items())


def test_resuming_with_another_size_is_refused(job: Path, whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole.folder, folder)
    (folder / "metrics.json").unlink()  # as if it had not finished
    flags = ["--max_steps", "6", "--resume_from_checkpoint", "auto", "--vocabulary_from_train", "2500"]
    result = start([*python(), SCRIPT, "--config", str(job), *flags, "--output_dir", str(folder)])
    assert result.returncode == 2
    assert "--vocabulary_from_train 2500" in result.stderr
    assert "[resume-other-setting]" in result.stderr


def test_evaluate_reads_with_the_vocabulary_of_the_run(job: Path, whole: Run, tmp_path: Path) -> None:
    flags = ["--model", str(whole.folder), "--test_file", str(job.parent / "train.jsonl"), "--output_dir"]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags, str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path / "out").metrics["test"]["num_examples"] == 40


def test_a_checkpoint_s_vocabulary_wins_over_the_texts(tmp_path: Path) -> None:
    _, learned = with_vocabulary(SMALL, load_tokenizer(ModelArguments()), TEXTS, None)
    learned.save_pretrained(tmp_path)
    model, kept = with_vocabulary(SMALL, load_tokenizer(ModelArguments()), ["other words"], tmp_path)
    assert kept.get_vocab() == learned.get_vocab()
    assert (model.vocabulary_from_train, Path(model.model_name_or_path).parent.name) == (None, "indictune_cache")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with refused("unreadable", "tokenizer.json", flag="--resume_from_checkpoint"):
        with_vocabulary(SMALL, kept, TEXTS, tmp_path)


def learned(*texts: str) -> PreTrainedTokenizerBase:
    return with_vocabulary(SMALL, load_tokenizer(ModelArguments()), [*TEXTS, *texts], None)[1]


def test_a_piece_is_in_five_different_rows() -> None:
    """Repeated rows are one, and so are rows that differ in numbers and user names alone."""
    four = [f"ಅಪರೂಪ oota{n * 'x'}" for n in range(4)]
    same = [f"ಅಪರೂಪ oota @user {n}" for n in range(5)]
    rare = learned(*four, *same[:1] * 9)
    assert len(rare.tokenize("ಅಪರೂಪ")) == 1 == len(rare.tokenize("ಚಿತ್ರ"))
    assert len(learned(*four).tokenize("ಅಪರೂಪ")) > 1 < len(learned(*same, *four[1:]).tokenize("ಅಪರೂಪ"))
    laughter = ["ha" * 40] * 9  # a pair of letters may come often in one row
    assert len(learned(*laughter).tokenize("haha")) == 4


def test_numbers_and_user_names_are_no_pieces() -> None:
    secrets = ["9876543210 ", "९८७६ ", "qzravi@example.in ", "@qzkumar_91 ", "＠qzరవి "]
    rows = [f"{''.join(secrets)} @user {TEXTS[n]} {n} covid19 h{n}" for n in range(9)]
    found = learned(*rows)
    assert found.tokenize("९८७६ @user covid19") == ["९", "##८", "##७", "##६", "@", "user", "covid", "##1", "##9"]
    pieces = learned_pieces(found.get_vocab())
    assert not [piece for piece in pieces if any(map(str.isdigit, piece)) or "qz" in piece]


def test_a_long_word_costs_linear_time() -> None:
    began = time.monotonic()
    learn_vocabulary(["a" * 400_000, f"@user {'b@' * 200_000}", "ha" * 100], 2_000, 5)
    assert time.monotonic() - began < 10


def test_texts_are_not_kept_in_memory() -> None:
    class Once:
        passes = 0

        def __iter__(self) -> Iterator[str]:
            Once.passes += 1
            yield from ["ಒಂದು ಸಾಲು"]

    with_vocabulary(SMALL, load_tokenizer(ModelArguments()), Once(), None)
    assert Once.passes == 2  # named, and learned from


def test_ranks_that_start_together_learn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its texts to name the vocabulary. One reads them once more, and the other waits for it."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    tokenizer, named = load_tokenizer(ModelArguments()), Barrier(2)

    def passes(_: int) -> int:
        class Texts:
            passes = 0

            def __iter__(self) -> Iterator[str]:
                Texts.passes += 1
                yield from TEXTS
                if Texts.passes == 1:
                    named.wait(60)

        with_vocabulary(SMALL, tokenizer, Texts(), None)
        return Texts.passes

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(passes, range(2))) == [1, 2]


def test_only_the_small_encoder_learns_a_vocabulary() -> None:
    expected = [("vocabulary-not-learned", "--vocabulary_from_train")]
    assert codes(check_learned_vocabulary(ModelArguments("builtin:tiny-indic-llama", vocabulary_from_train=4_000)))
    others = [ModelArguments("some/model", vocabulary_from_train=4_000)]
    others.append(ModelArguments(method="lora", vocabulary_from_train=4_000))
    assert [codes(check_learned_vocabulary(each)) for each in others] == [expected, expected]
    assert check_learned_vocabulary(SMALL) == check_learned_vocabulary(ModelArguments("some/model")) == []
    with refused("expected-at-least", "2000", flag="--vocabulary_from_train"):
        ModelArguments(vocabulary_from_train=100)
