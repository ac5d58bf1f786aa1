"""Whether a tokenizer keeps the vowel signs of Indic scripts, which many normalisers take for accents."""

from __future__ import annotations

import unicodedata
from collections import Counter

from transformers import PreTrainedTokenizerBase

# A few common words a script, with vowel signs before and after the consonant, the virama, the anusvara and the nukta.
PROBES = {
    "Devanagari": "हिन्दी ज़िन्दगी में कुछ भी खुशी",
    "Telugu": "కృష్ణుడు చాలా మంచి సినిమా తెలుగు",
    "Tamil": "வணக்கம் நண்பர்கள் மிகவும் கொடுமை",
}


def lost_marks(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """How many combining marks of each script's probe are gone after tokenising, for the scripts that lose any."""
    lost = {script: _lost_from(tokenizer, text) for script, text in PROBES.items()}
    return {script: count for script, count in lost.items() if count}


def _lost_from(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    # Decoded text is compared, not tokens: byte-level tokens spell no characters.
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return (_marks(text) - _marks(str(decoded))).total()


def _marks(text: str) -> Counter[str]:
    composed = unicodedata.normalize("NFC", text)
    return Counter(char for char in composed if unicodedata.category(char).startswith("M"))
