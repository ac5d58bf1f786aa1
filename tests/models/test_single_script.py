"""IndicBERTv2-SS reads Indic scripts in Devanagari alone."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from indictune.config.arguments import ModelArguments
from indictune.models.load import load_tokenizer
from tests.hub_layouts.encoders import indicbert_v2
from tests.hub_layouts.shelf import write_files

BLOCKS = (0x0980, 0x0A00, 0x0A80, 0x0B00, 0x0B80, 0x0C00, 0x0C80, 0x0D00)
TEXTS = ("ಈ ಸಿನಿಮಾ ಚೆನ್ನಾಗಿದೆ ೧೨", "এই ছবিটি খুব ভালো", "ఈ సినిమా 😀 good", "இந்த படம்", "ਇਹ ਫ਼ਿਲਮ", "यह फ़िल्म।")


def in_devanagari(text: str) -> str:
    """By the offset of each letter in its block of Unicode, as indic-nlp-library 0.92 transliterates to Hindi."""
    block = {char: next((each for each in BLOCKS if 0 <= ord(char) - each < 0x70), None) for char in text}
    return "".join(char if (begin := block[char]) is None else chr(ord(char) - begin + 0x900) for char in text)


def test_its_tokenizer_writes_devanagari_and_is_saved_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelArguments(str(write_files(tmp_path / "IndicBERTv2-SS", indicbert_v2()[0]))))
    plain = load_tokenizer(ModelArguments(str(write_files(tmp_path / "IndicBERTv2-MLM-only", indicbert_v2()[0]))))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        expected = plain(in_devanagari(text))["input_ids"]
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"] == expected, text
    assert plain(TEXTS[0])["input_ids"] != tokenizer(TEXTS[0])["input_ids"]
