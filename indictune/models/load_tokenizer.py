"""Read a model's tokenizer, so that it keeps vowel signs and has a padding token, and check that it fits the model."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from tokenizers import normalizers
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import resolve_revision

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.load import Model
from indictune.models.trusted_files import MODEL_FLAG, check_links, check_tokenizer_settings, explained

logger = logging.getLogger(__name__)

# A few common words of each script, with vowel signs before and after the consonant, virama, anusvara and nukta.
PROBES = {
    "Devanagari": "हिन्दी ज़िन्दगी में कुछ भी खुशी",
    "Telugu": "కృష్ణుడు చాలా మంచి సినిమా తెలుగు",
    "Tamil": "வணக்கம் நண்பர்கள் மிகவும் கொடுமை",
}


def lost_vowel_signs(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Script -> number of combining marks that its probe loses by tokenising, for the scripts that lose any."""
    lost = {}
    for script, text in PROBES.items():
        # Compare decoded text, not tokens: byte-level tokens are not characters.
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        if (count := _marks(text) - _marks(str(decoded))) > 0:
            lost[script] = count
    return lost


def _marks(text: str) -> int:
    return sum(unicodedata.category(char).startswith("M") for char in unicodedata.normalize("NFC", text))


# A name of a model whose tokenizer knows Devanagari alone, for texts in all Indic scripts that are written in it.
SINGLE_SCRIPT = "indicbertv2-ss"
# Bengali, Gurmukhi, Gujarati, Oriya, Tamil, Telugu, Kannada and Malayalam: Unicode gives each a block that is laid
# out as Devanagari's. AI4Bharat's programs write texts for the model by these offsets (indic-nlp-library 0.92,
# `UnicodeIndicTransliterator`).
_BLOCKS = (0x0980, 0x0A00, 0x0A80, 0x0B00, 0x0B80, 0x0C00, 0x0C80, 0x0D00)
_DEVANAGARI, _LETTERS = 0x0900, 0x70


def write_devanagari(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a fast tokenizer, and what is saved of it, write all Indic scripts in Devanagari before it splits a text."""
    import sentencepiece  # which few models need
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    pairs = [(block + letter, _DEVANAGARI + letter) for block in _BLOCKS for letter in range(_LETTERS)]
    with TemporaryDirectory() as folder:
        rules = Path(folder, "rules.tsv")
        rules.write_text("".join(f"{old:X}\t{new:X}\n" for old, new in pairs), encoding="ascii")
        sentencepiece.set_min_log_level(2)
        made = sentencepiece.SentencePieceNormalizer(rule_tsv=str(rules), add_dummy_prefix=False)
    proto = ModelProto()
    proto.ParseFromString(made.serialized_model_proto())
    steps = [normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)]
    backend = cast(Any, tokenizer).backend_tokenizer
    steps += [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence(steps)


def load_tokenizer(args: ModelArguments, flag: str = MODEL_FLAG) -> PreTrainedTokenizerBase:
    """The model's tokenizer, which keeps vowel signs if its vocabulary has them, and has a padding token.

    ALBERT's and BERT's tokenizers drop the vowel signs of Indic scripts as accents by default. This is switched off
    if that restores signs. A model whose vocabulary lacks the signs stays as it was trained, with a warning.
    IndicBERTv2-SS gets texts in Devanagari (`write_devanagari`).

    A tokenizer without a padding token (LLaMA) pads with its end-of-text token: a new token would add a row to the
    embedding.

    Raises:
        UserError: as `read_tokenizer`; or `tokenizer-without-words` or `tokenizer-without-padding`.
    """
    tokenizer = read_tokenizer(args, flag)
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        # Without files, transformers 5 makes a tokenizer to which every text is unknown.
        raise UserError("tokenizer-without-words", flag, args.model_name_or_path)
    if SINGLE_SCRIPT in args.model_name_or_path.lower():
        write_devanagari(tokenizer)
        logger.info(
            "%s reads all Indic scripts written in Devanagari: so does its tokenizer.", args.model_name_or_path
        )
    lost = lost_vowel_signs(tokenizer)
    if lost:
        keeping = read_tokenizer(args, flag, keep_accents=True, strip_accents=False)
        still_lost = lost_vowel_signs(keeping)
        if sum(still_lost.values()) < sum(lost.values()):
            tokenizer, lost = keeping, still_lost
    if lost:
        logger.warning(
            "The tokenizer of %s loses vowel signs of %s text. Use a model that was trained on these scripts if your "
            "texts are written in them.",
            args.model_name_or_path,
            ", ".join(lost),
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("tokenizer-without-padding", flag, args.model_name_or_path)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(args: ModelArguments, flag: str, **settings: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer as it is, if it is trusted; else a `UserError`, such as `chat-template-name`."""
    path = builtin.resolve(args.model_name_or_path)
    check_links(Path(path), flag)
    # Broken settings raise any error (AttributeError, TypeError); tokenizers raises bare exceptions.
    with explained(args, Exception, flag=flag):
        revision = resolve_revision(path, args.model_revision)  # check and read the same commit
        check_tokenizer_settings(path, revision, flag)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=args.trust_remote_code, **settings
        )
    for name in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        if Path(name).name != name or "\0" in name:  # transformers 5.23 refuses to save it, after hours of training
            raise UserError("chat-template-name", flag, args.model_name_or_path, name=repr(name))
    return tokenizer


def check_vocabulary(
    args: ModelArguments, model: Model, tokenizer: PreTrainedTokenizerBase, flag: str = MODEL_FLAG
) -> None:
    """Refuse token ids beyond the rows of the model's embedding (`token-id-without-row`). Ids may have gaps."""
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise UserError("token-id-without-row", flag, args.model_name_or_path, token_id=largest, rows=rows)
