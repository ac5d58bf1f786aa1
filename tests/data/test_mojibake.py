"""Texts that were decoded by the wrong encoding."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import BadRows
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.data.health.findings import Mojibake
from indictune.data.load_rows import load_splits
from indictune.errors import Problems

WRONG = {
    "फिल्म": "à¤«à¤¿à¤²à¥\u008dà¤®",
    "படம்": "à®ªà®Ÿà®®à¯\u008d",
    "మంచి": "à°®à°‚à°šà°¿",
    "اچھا": "Ø§Ú†Ú¾Ø§",
    "nice 😀": "nice ðŸ˜€",
    "nice 😀!": "nice ð\u009f\u0098\u0080!",
    "love ❤ it": "love â\u009d¤ it",
    "ठीक": "Ã\u00a0Â¤Â\u00a0Ã\u00a0Â¥â‚¬Ã\u00a0Â¤â€¢",  # twice
}
RIGHT = ["फिल्म अच्छी थी 😀", "don’t", "donâ€™t", "Très bon à déjà vu", "Øl på Ærø", "Màráñã", "5 × 3 = £15", ""]


def count(*texts: str | None) -> int:
    mojibake = Mojibake()
    list(mojibake.watching(iter([pa.record_batch({"text": texts, "line": range(len(texts))})])))
    return mojibake.count


@pytest.mark.parametrize("meant", WRONG)
def test_indic_letters_and_emoji_are_found_behind_a_wrong_decoding(meant: str) -> None:
    assert count(WRONG[meant]) == 1
    mojibake = Mojibake()
    mojibake.check(WRONG[meant], 7)
    (found,) = mojibake.findings("--train_file", BadRows("t.csv"), 9)
    assert (found.count, found.of) == (1, 9)
    assert "t.csv:7" in found.examples[0]
    assert meant in found.in_full


def test_right_texts_and_other_damage_are_not_counted() -> None:
    assert count(*RIGHT, None) == 0


def test_a_run_names_the_first_line_and_the_number(tmp_path: Path) -> None:
    texts = ["ठीक", WRONG["फिल्म"], "ok", *[WRONG["படம்"]] * 3]
    lines = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(texts)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    notes = load_splits(DataArguments(train_file=str(path))).notes
    (note,) = [each for each in notes if "wrong encoding" in each]
    assert note.startswith(f"--train_file {path}: 4 texts ")
    assert f"{path}:2" in note


def test_conversations_are_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt": "फिल्म?", "completion": WRONG["फिल्म"]}) + "\n", encoding="utf-8")
    args = ChatDataArguments(train_file=str(path))
    (note,) = load_conversations(chat_sources(args, Problems()), args).notes
    assert f"{path}:1" in note
