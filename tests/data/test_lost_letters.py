"""Files whose letters have become question marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.config.arguments import DataArguments
from indictune.data import read_files
from indictune.data.load_rows import load_splits

HINDI = ["क्या फिल्म थी", "बहुत बुरी", "अच्छा"]


def notes_of(folder: Path, texts: list[str], encoding: str) -> list[str]:
    rows = [f"{text},{('good', 'bad')[number % 2]}\n" for number, text in enumerate(texts)]
    (folder / "train.csv").write_bytes("".join(["text,label\n", *rows]).encode(encoding, "replace"))
    return load_splits(DataArguments(train_file="train.csv")).notes


@pytest.mark.parametrize(("romanised", "told"), [(1, True), (50, True), (57, False), (500, False)])
def test_are_told_where_more_than_one_in_twenty_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, romanised: int, told: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 20)
    texts = [f"kya film thi? {number} caf\xe9" for number in range(romanised)] + HINDI
    assert notes_of(tmp_path, texts, "utf-8") == []
    # Bytes as Excel writes them, which are UTF-8 too where all letters are lost or Latin.
    notes = notes_of(tmp_path, [text.replace("\xe9", "e") for text in texts], "cp1252")
    assert len(notes) == told
    if told:
        assert notes[0].startswith(f"--train_file train.csv: 3 of {romanised + 3} rows ")
        assert f"train.csv:{romanised + 2}." in notes[0]


def test_question_marks_that_were_written_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert notes_of(tmp_path, ["क्या??", "क्या ??", "kya??", "kya ?", "اچھا ???", "?"], "utf-8") == []
