"""Documents of raw text are read whole, cut into pieces and packed, and binary is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_recipe
from indictune.data.documents import Cutter
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.load import load_tokenizer
from indictune.preflight.checks import read_rows
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.chat import CausalText
from indictune.tasks.protocol import Tokens
from indictune.tasks.raw_text import MaskedText, TextRows
from tests.plans import codes

MLM, CLM = MaskedText(), CausalText()


def read(task: Any, *argv: str) -> tuple[Any, TextRows]:
    plan, problems = plan_of_rows(read_recipe(["--output_dir", "out", *argv], task.arguments), task)
    return plan, read_rows(plan, task, problems)


def tokens(task: Any, *argv: str) -> tuple[Tokens, TextRows]:
    plan, rows = read(task, *argv)
    return task.tokenise(plan, rows), rows


def refused(task: Any, *argv: str) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as raised:
        read(task, *argv)
    return codes(raised.value.problems)


def test_a_document_is_a_block_a_line_or_a_row(tmp_path: Path) -> None:
    txt, rows = tmp_path / "t.txt", tmp_path / "t.jsonl"
    txt.write_bytes("\ufeffone\r\ntwo\r\n\r\n  \nतीन\n".encode())
    rows.write_text("".join(json.dumps({"text": each}) + "\n" for each in ("one\ntwo", "तीन")), encoding="utf-8")
    for file, more, texts, lines in (
        (txt, (), ["one\ntwo", "तीन"], [1, 5]),
        (txt, ("--txt_documents", "lines"), ["one", "two", "तीन"], [1, 2, 5]),
        (rows, (), ["one\ntwo", "तीन"], [1, 2]),
    ):
        table = read(CLM, "--train_file", str(file), "--validation_split", "0", *more)[1].splits.rows["train"].table
        assert table["text"].to_pylist() == texts
        assert table["line"].to_pylist() == lines
    assert table["language"].to_pylist()[1] == "hi"


def test_a_masked_model_reads_texts_as_its_classifier_does_and_a_causal_one_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("see https://a.org @someone1\nnow\n", encoding="utf-8")
    flags = ["--train_file", str(tmp_path / "t.txt"), "--validation_split", "0"]
    for task, text in ((MLM, "see http @user now"), (CLM, "see https://a.org @someone1\nnow")):
        assert list(read(task, *flags)[1].splits.rows["train"].texts) == [text]


@pytest.mark.parametrize("task", [MLM, CLM], ids=["mlm", "clm"])
def test_binary_is_refused_with_its_line_or_left_out(tmp_path: Path, task: Any) -> None:
    good = "good text\n\n" * 120
    (tmp_path / "a.txt").write_bytes(good.encode() + b"\x7fELF\x00\x01\n\nfirst\nabc \xff\xfe\nlast\n")
    flags = ["--train_file", str(tmp_path / "a.txt"), "--validation_split", "0"]
    found = refused(task, *flags)
    assert {code for code, _ in found} == {"binary-in-text", "not-utf8"}
    with pytest.raises(UserError, match=r"a\.txt:241"):
        read(task, *flags)
    rows = read(task, *flags, "--bad_rows", "quarantine", "--max_bad_fraction", "0.02")[1]
    assert len(rows.splits.rows["train"]) == 120
    (tmp_path / "b.jsonl").write_text('{"text": "a\\u0000b"}\n', encoding="utf-8")
    assert refused(task, "--train_file", str(tmp_path / "b.jsonl"))[0][0] == "binary-in-text"
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    assert refused(task, "--train_file", str(tmp_path / "empty.txt"))[0][0] == "no-rows"


def test_adapters_learn_no_masked_words(tmp_path: Path) -> None:
    from indictune.preflight.checks import preflight

    plan, _ = plan_of_rows(read_recipe(["--dataset_name", "builtin:tweets", "--method", "lora"], MLM.arguments), MLM)
    assert ("not-of-raw-text", "--method") in codes(preflight(plan, MLM))


def documents(tmp_path: Path) -> list[str]:
    """Short ones, and one of more tokens than a row."""
    random = np.random.default_rng(0)
    words = ["good", "film", "अच्छा", "दिन", "bad", "சினிமா"]
    texts = [" ".join(random.choice(words, random.integers(2, 30))) for _ in range(80)]
    texts.append(" ".join(random.choice(words, 200)))
    (tmp_path / "t.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return ["--train_file", str(tmp_path / "t.txt"), "--validation_split", "0", "--max_length", "32"]


@pytest.mark.parametrize("task", [MLM, CLM], ids=["mlm", "clm"])
def test_packed_rows_hold_every_token_once_and_are_full(tmp_path: Path, task: Any) -> None:
    made, rows = tokens(task, *documents(tmp_path))
    tokenizer, texts = rows.cutter.tokenizer, list(rows.splits.rows["train"].texts)
    content: dict[int, list[list[int]]] = {}
    for row in made.train.to_list():
        ends = np.cumsum(row["seq_lengths"])
        assert row["length"] == ends[-1] <= 32
        for ids, labels, number in zip(
            np.split(row["input_ids"], ends[:-1]), np.split(row["labels"], ends[:-1]), row["rows"], strict=True
        ):
            assert labels[0] == -100
            if task is CLM:  # all tokens but the first of a piece
                assert labels[1:].tolist() == ids[1:].tolist()
            else:
                assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
                ids = ids[1:-1]
            content.setdefault(number, []).append(ids.tolist())
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = [] if task is MLM else [tokenizer.eos_token_id]
    for number, text_ids in enumerate(whole):  # packing may change the order of the pieces of a document
        kept = [*text_ids, *end]
        if task is CLM and len(kept) % 32 == 1:  # nothing predicts a last token that is alone
            kept.pop()
        assert sorted(itertools.chain.from_iterable(content[number])) == sorted(kept)
    assert len(content[80]) > 6
    assert np.mean(made.train["length"]) > 0.95 * 32
    assert any(" of 81 documents are longer" in note for note in made.notes)


def test_a_document_that_is_cut_loses_no_prediction_but_the_first_of_each_piece() -> None:
    llama = load_tokenizer(ModelArguments(builtin.resolve("builtin:tiny-indic-llama")))
    cutter = Cutter.of(llama, 5, None)
    for words_of_text in range(1, 12):
        text = "good " * words_of_text
        ids = [*llama(text, add_special_tokens=False)["input_ids"], llama.eos_token_id]
        pieces = list(cutter.pieces([text]))
        assert all(1 < len(piece.ids) <= 5 for piece in pieces)
        predicted = [label for piece in pieces for label in piece.labels if label >= 0]
        assert predicted == [token for at, token in enumerate(ids) if at % 5]


def test_evaluations_count_the_characters_that_are_predicted(tmp_path: Path) -> None:
    flags = ["--dataset_name", "builtin:tweets"]
    made, rows = tokens(CLM, *flags)
    assert made.validation is not None
    texts = list(rows.splits.rows["validation"].texts)
    for row, text in list(zip(made.validation.to_list(), texts, strict=True))[:20]:
        assert 0 <= len(text.strip()) - row["characters"] <= 40
    masked, rows = tokens(MLM, *flags)
    assert masked.validation is not None
    for row in masked.validation.to_list():
        hidden = [token for token in row["labels"] if token >= 0]
        assert hidden
        assert 0 < row["characters"] <= len(str(rows.cutter.tokenizer.decode(hidden)).replace(" ", ""))
