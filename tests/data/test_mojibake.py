"""Texts that were decoded by the wrong encoding, or written as escapes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import BadRows
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.data.health.encodings import DamagedTexts, findings_of_split
from indictune.data.load_rows import load_splits
from indictune.data.sentences import Sentences
from indictune.errors import Problems
from tests.ranks.launching import ROOT

WRONG = {
    "फिल्म": "à¤«à¤¿à¤²à¥\u008dà¤®",
    "படம்": "à®ªà®Ÿà®®à¯\u008d",
    "మంచి": "à°®à°‚à°šà°¿",
    "اچھا": "Ø§Ú†Ú¾Ø§",
    "nice 😀": "nice ðŸ˜€",
    "nice 😀!": "nice ð\u009f\u0098\u0080!",
    "love ❤ it": "love â\u009d¤ it",
    "don’t": "donâ€™t",
    "ठीक": "Ã\u00a0Â¤Â\u00a0Ã\u00a0Â¥â‚¬Ã\u00a0Â¤â€¢",  # twice
}
RIGHT = ["फिल्म अच्छी थी 😀", "don’t", "Très bon à déjà vu", "Øl på Ærø", "Màráñã", "5 × 3 = £15", ""]


ENCODINGS = ["cp437", "cp850", "cp852", "cp866", "koi8-r", "mac-roman", "cp932", "shift_jis", "gbk", "gb18030"]
ENCODINGS += ["cp1250", "cp1251", "cp1253", "iso8859-15"]
# Right texts in which the search stops: their first letters are what an encoding makes of an Indic letter.
OTHERS = [
    "рок",
    "Рок-музыка, рост и речка: ремонт роскошного рояля",
    "ром, рис и раки…",
    "Привіт, як справи? Шість років",
    "Џорџ “Џорџ”",
    "αñ και άλλα",
    "Καλημέρα σας, τι κάνετε; ΰ§",
    "今日は天気がいいですね。爨い",
    "ｶﾀｶﾅ ﾘﾙﾚ ﾘ",
    "今天天气很好，啶啶",
    "안녕하세요 여러분",
    "Óñ São João, ações não são canções",
    "Zażółć gęślą jaźń",
    "đź Čovjek",
    "हिंदी में रिव्यू рок 😀",
    "తెలుగు తమిళ் மிகவும் اچھا",
]


def count(*texts: str | None) -> int:
    mojibake = DamagedTexts()
    list(mojibake.watching(iter([pa.record_batch({"text": texts, "line": range(len(texts))})])))
    return mojibake.mojibake


@pytest.mark.parametrize("meant", WRONG)
def test_indic_letters_and_emoji_are_found_behind_a_wrong_decoding(meant: str) -> None:
    assert count(WRONG[meant]) == 1
    mojibake = DamagedTexts()
    mojibake.check(WRONG[meant], 7)
    (found,) = mojibake.findings("--train_file", BadRows("t.csv"), 9)
    assert (found.count, found.of) == (1, 9)
    assert "t.csv:7" in found.examples[0]
    assert meant in found.in_full


def test_right_texts_and_other_damage_are_not_counted() -> None:
    assert count(*RIGHT, None) == 0
    assert [text for text in OTHERS if count(text)] == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_that_were_read_by_any_usual_encoding_are_found(encoding: str) -> None:
    meant = ["सेवा बेहद खराब निकली", "படம் மிகவும் அருமை 😡", "మంచి సినిమా", "রোগ ভালো"]
    damaged = DamagedTexts()
    for line, text in enumerate(meant, 1):
        damaged.check(text.encode().decode(encoding, errors="replace"), line)
    assert damaged.mojibake >= (2 if encoding == "gbk" else 3)  # some lose most letters of a script


@pytest.mark.parametrize("encoding", [each for each in ENCODINGS if not each.startswith(("cp9", "g", "shift"))])
def test_quotes_of_english_texts_are_found_too(encoding: str) -> None:
    assert count("I don’t know".encode().decode(encoding, errors="replace")) == 1


def findings_of(name: str) -> dict[str, tuple[int, int, str]]:
    """By name of the finding: its count, of how many texts, and what the user reads."""
    table = load_splits(DataArguments(train_file=str(ROOT / "tests/inputs" / name), validation_split=0.0))
    return {each.name: (each.count, each.of, each.in_full) for each in table.findings if "texts" in each.in_full}


@pytest.mark.parametrize("encoding", ["cp437", "cp866", "cp1251"])
def test_the_encoding_is_named(encoding: str) -> None:
    found = findings_of(f"mojibake_{encoding}.csv")
    assert found.keys() == {"mojibake"}
    count, of, note = found["mojibake"]
    assert (count, of) == (6, 80)
    assert "'सेवा बेहद खराब निकली 0'" in note
    assert {"cp1251": "windows-1251"}.get(encoding, encoding) in note


@pytest.mark.parametrize(("name", "texts"), [("texts_python_bytes.csv", 60), ("texts_escaped.csv", 36)])
def test_texts_that_hold_escapes_for_letters_are_found(name: str, texts: int) -> None:
    found = findings_of(name)
    assert found.keys() == {"escaped_texts"}
    assert found["escaped_texts"][:2] == (texts, 60)


def test_code_and_single_escapes_are_no_damage() -> None:
    right = [
        r"C:\users\ud83d",
        "b'day party",
        r'print("\u0939\u0947")',
        r"[\u0900-\u097f]+",
        r"'\xe0\xa4\xb8'.decode()",
    ]
    damaged = [
        r"cool\ud83d\ude00",
        r"cool \U0001f600",
        r"x \xe0\xa4\xb8",
        "b'ok'",
        'b"it\'s ok"',
        r'"\u0939\u0947 \u0939\u0947',
    ]
    seen = DamagedTexts()
    for text in right:
        seen.check(text, 1)
    assert seen.escaped == 0
    list(seen.watching(iter([pa.record_batch({"text": damaged, "line": range(len(damaged))})])))
    assert seen.escaped == len(damaged)


def test_a_run_names_the_first_line_and_the_number(tmp_path: Path) -> None:
    texts = ["ठीक", WRONG["फिल्म"], "ok", *[WRONG["படம்"]] * 3]
    lines = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(texts)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    notes = load_splits(DataArguments(train_file=str(path))).notes
    (note,) = [each for each in notes if "wrong encoding" in each]
    assert note.startswith(f"--train_file {path}: 4 texts ")
    assert f"{path}:2" in note


def test_sentences_are_looked_at_too() -> None:
    lines = [4, 7, 9]
    words = pa.array([["nice", "film"], [WRONG["फिल्म"], "is"], ["ok"]])
    table = pa.table({"words": words, "tags": words, "language": ["en"] * 3, "line": lines})
    (found,) = findings_of_split(Sentences(table, "t.conll", "--train_file", ()))
    assert (found.name, found.count, found.of) == ("mojibake", 1, 3)
    assert "t.conll:7" in found.note


def test_conversations_are_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt": "फिल्म?", "completion": WRONG["फिल्म"]}) + "\n", encoding="utf-8")
    args = ChatDataArguments(train_file=str(path))
    (note,) = load_conversations(chat_sources(args, Problems()), args).notes
    assert f"{path}:1" in note
