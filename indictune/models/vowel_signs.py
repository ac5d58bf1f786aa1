"""Check that a tokenizer keeps the vowel signs of Indic scripts. Many normalisers drop them as accents."""

from __future__ import annotations

import unicodedata
from collections import Counter

from transformers import PreTrainedTokenizerBase

# A few common words of each script, with vowel signs before and after the consonant, virama, anusvara and nukta.
PROBES = {
    "Devanagari": "हिन्दी ज़िन्दगी में कुछ भी खुशी",
    "Telugu": "కృష్ణుడు చాలా మంచి సినిమా తెలుగు",
    "Tamil": "வணக்கம் நண்பர்கள் மிகவும் கொடுமை",
}


def lost_vowel_signs(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Script -> number of combining marks that its probe loses by tokenising, for the scripts that lose any."""
    lost = {script: _lost_from(tokenizer, text) for script, text in PROBES.items()}
    return {script: count for script, count in lost.items() if count}


def _lost_from(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    # Compare decoded text, not tokens: byte-level tokens are not characters.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return (_marks(text) - _marks(str(decoded))).total()


def _marks(text: str) -> Counter[str]:
    composed = unicodedata.normalize("NFC", text)
    return Counter(char for char in composed if unicodedata.category(char).startswith("M"))
