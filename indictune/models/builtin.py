"""The package's own small BERT and LLaMA with random weights: built on the first call, then read from a cache."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from indictune.data.text.cleaning import PRIVATE, clean
from indictune.errors import UserError
from indictune.files import cache_folder, fill_once

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# The vocabulary holds every letter and sign of these blocks, so no word of the three languages is unknown.
ALPHABET_BLOCKS = {"Devanagari": (0x0900, 0x097F), "Tamil": (0x0B80, 0x0BFF), "Telugu": (0x0C00, 0x0C7F)}
EMOTICONS = (0x1F600, 0x1F64F)
JOINERS = "\u200c\u200d"
SEED = 0
_LONGEST_WORD = 200  # characters; a longer word is an unknown token


@dataclass(frozen=True)
class Size:
    """The size of a built model. A head has 64 dimensions, and a feed-forward layer 4 x `hidden_size`."""

    hidden_size: int = 128
    num_layers: int = 2
    vocab_size: int = 5000
    max_length: int = 512


def build_tiny_bert(texts: Sequence[str], folder: Path | str, size: Size | None = None) -> None:
    """Write a BERT of the given size with random weights, and a tokenizer learned from `texts`, to `folder`.

    The same texts and size give the same bytes. The caller's random state does not change.
    """
    size = size or Size()
    build_with(learn_vocabulary(texts, size.vocab_size), folder, size)


def build_with(vocabulary: Mapping[str, int], folder: Path | str, size: Size) -> None:
    """As `build`, with a vocabulary from `learn_vocabulary`."""
    tokenizer = make_tokenizer(vocabulary, size.max_length)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=max(1, size.hidden_size // 64),
        intermediate_size=4 * size.hidden_size,
        max_position_embeddings=size.max_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    _save_random(BertModel, config, folder)


def _save_random(kind: type[PreTrainedModel], config: PreTrainedConfig, folder: Path | str) -> None:
    # `torch.manual_seed` would also seed the GPUs' generators, which `fork_rng(devices=[])` does not restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = kind(config)
    model.save_pretrained(folder)


def make_tokenizer(vocabulary: Mapping[str, int], max_length: int) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer that keeps every vowel sign and joiner.

    BERT's own normaliser does not: `clean_text` drops ZWJ and ZWNJ, and `strip_accents` drops the vowel signs.
    """
    backend = untrained_word_pieces()
    backend.model = WordPiece(dict(vocabulary), unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )


def tweet_texts() -> list[str]:
    """The texts of the built-in training tweets, cleaned as a run cleans its rows."""
    return [clean(row["text"]) for row in sample_rows("train.jsonl")]


def sample_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a built-in jsonl file."""
    lines = resources.files("indictune").joinpath("data/samples", name).read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.split("\n") if line]


def untrained_word_pieces() -> Tokenizer:
    """Split texts into words. Each emoji is a word: otherwise one unknown emoji makes its whole run unknown."""
    backend = Tokenizer(WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Split(Regex(r"[\p{So}\p{Sk}]"), "isolated")]
    )
    return backend


def learn_vocabulary(texts: Iterable[str], vocab_size: int, min_rows: int = 0) -> dict[str, int]:
    """Token -> id: the special tokens, every character of the alphabet inside and at the start of a word, and pieces.

    `texts` are read twice, and the same ones give the same vocabulary, on every machine. With `min_rows` they are
    somebody's: they are read once, and a piece of several characters is in at least as many different texts. None has
    a digit or comes from a user name.

    The characters inside a word (`##x`) are special tokens. Otherwise the trainer adds only those that it saw there,
    in the random order of a hash table, and every process learns another vocabulary (tokenizers 0.23).
    """
    backend = untrained_word_pieces()
    counts: Counter[str] = Counter()
    words = CountedWords(backend, min_rows)
    for text in texts:
        normal = backend.normalizer.normalize_str(text)
        counts.update(char for char in normal if not char.isspace())
        if min_rows:
            words.add(normal)
    frequent = sorted(counts, key=lambda char: (-counts[char], char))[: vocab_size // 8]
    alphabet = list(dict.fromkeys([*_alphabet(), *frequent]))
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_rows,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*BERT_TOKENS, *(f"##{char}" for char in alphabet)],
        show_progress=False,
    )
    backend.train_from_iterator(words.repeated() if min_rows else texts, trainer)
    vocabulary: dict[str, int] = backend.get_vocab()
    rare = words.rare(learned_pieces(vocabulary)) if min_rows else set()
    kept = sorted(vocabulary.keys() - rare, key=vocabulary.__getitem__)
    return {piece: number for number, piece in enumerate(kept)}


class CountedWords:
    """In how many different texts each word is, and the numbers of the first `min_rows` of them."""

    def __init__(self, backend: Tokenizer, min_rows: int) -> None:
        self._split = backend.pre_tokenizer.pre_tokenize_str
        self._min_rows = min_rows
        self._texts: set[int] = set()  # hashes
        self.counts: Counter[str] = Counter()
        self._first: dict[str, list[int]] = {}

    def add(self, text: str) -> None:
        """Count the words of a normalised text, unless a text before it has the same ones."""
        words = tuple(word for word, _ in self._split(PRIVATE.sub(" ", text)) if len(word) <= _LONGEST_WORD)
        if hash(words) in self._texts:
            return
        self._texts.add(hash(words))
        for word in set(words):
            self.counts[word] += 1
            if self.counts[word] <= self._min_rows:
                self._first.setdefault(word, []).append(len(self._texts))

    def repeated(self) -> Iterator[str]:
        """Each word as often as there are texts with it."""
        return (f"{word} " * count for word, count in self.counts.items())

    def rare(self, pieces: Collection[str]) -> set[str]:
        """The pieces that are in fewer than `min_rows` texts; `##` stands before one inside a word."""
        longest = max(map(len, pieces), default=0)
        texts: dict[str, set[int]] = {piece: set() for piece in pieces}
        for word, numbers in self._first.items():
            for start in range(len(word)):
                for end in range(start + 1, min(start + longest, len(word)) + 1):
                    piece = f"{'##' if start else ''}{word[start:end]}"
                    if piece in texts:
                        texts[piece].update(numbers)
        return {piece for piece, found in texts.items() if len(found) < self._min_rows}


def learned_pieces(vocabulary: Iterable[str]) -> list[str]:
    """The entries of a vocabulary that come from texts: those of several characters."""
    return [piece for piece in vocabulary if len(piece.removeprefix("##")) > 1 and piece not in BERT_TOKENS]


def _alphabet() -> list[str]:
    """Letters, signs and digits of the three scripts in NFC, printable ASCII, emoticons and the joiners."""
    blocks = [chr(code) for first, last in ALPHABET_BLOCKS.values() for code in range(first, last + 1)]
    composed = [char for char in blocks if unicodedata.is_normalized("NFC", char)]
    written = [char for char in composed if unicodedata.category(char)[0] in "LMN"]
    ascii_characters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    emoticons = [chr(code) for code in range(EMOTICONS[0], EMOTICONS[1] + 1)]
    return [*ascii_characters, *written, *JOINERS, *emoticons]


LLAMA_TEMPLATE = resources.files("indictune").joinpath("data", "chat_templates", "llama3.jinja")

# LLaMA 3's, so that its chat template fits.
BEGIN, END_OF_TEXT, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
LLAMA_TOKENS = (BEGIN, END_OF_TEXT, END_OF_TURN, "<|start_header_id|>", "<|end_header_id|>", "<|pad|>")
VOCABULARY = 4000
MAX_LENGTH = 512


def tweet_and_chat_texts() -> list[str]:
    """The texts of the built-in training tweets and chats."""
    tweets = [row["text"] for row in sample_rows("train.jsonl")]
    return tweets + [message["content"] for row in sample_rows("chats/train.jsonl") for message in row["messages"]]


def build_tiny_llama(texts: Sequence[str], folder: Path | str) -> None:
    """Write a LLaMA of 2 layers with random weights, and a tokenizer learned from `texts`, to `folder`.

    The same texts give the same bytes. The caller's random state does not change.
    """
    tokenizer = train_byte_pairs(texts)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    _save_random(LlamaForCausalLM, config, folder)


def train_byte_pairs(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with LLaMA 3's special tokens and chat template.

    Texts are split at spaces, so an Indic word may become one token: GPT-2's pattern splits it at every vowel sign.
    """
    backend = Tokenizer(BPE())
    at_spaces = pre_tokenizers.Split(" ", "merged_with_next")
    backend.pre_tokenizer = pre_tokenizers.Sequence([at_spaces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(LLAMA_TOKENS),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END_OF_TURN,
        pad_token="<|pad|>",
        additional_special_tokens=["<|start_header_id|>", "<|end_header_id|>", END_OF_TEXT],
        chat_template=LLAMA_TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


PREFIX = "builtin:"


@dataclass(frozen=True)
class BuiltIn:
    """How a model is made."""

    texts: Callable[[], list[str]]  # that the tokenizer learns from
    build: Callable[[Sequence[str], Path], None]  # writes a model to a folder; the same texts give the same bytes
    version: int = 1  # raise it when `build` changes, so that no stale cache is read


MODELS = {
    "tiny-indic-bert": BuiltIn(tweet_texts, build_tiny_bert),
    "tiny-indic-llama": BuiltIn(tweet_and_chat_texts, build_tiny_llama),
}


def resolve(model_name_or_path: str, flag: str = "--model_name_or_path") -> str:
    """The folder of a built-in model, made on the first call, or of a fetched one. Other names are unchanged.

    Every run loads the same files: ZeRO-3 shards parameters during construction, which changes their random numbers.

    Raises:
        UserError: `no-such-name`, `weights-not-fetched`, or the cache's folder cannot be written.
    """
    if not model_name_or_path.startswith((PREFIX, "fetched:")):
        return model_name_or_path
    name = model_name_or_path.removeprefix(PREFIX)
    if name not in MODELS:
        from indictune.models import fetched  # few runs need it

        if name == fetched.NAME:
            if not fetched.is_fetched():
                raise UserError("weights-not-fetched", flag, name, command=fetched.COMMAND)
            return str(fetched.fetched_folder())
        known = ", ".join([*(f"{PREFIX}{other}" for other in MODELS), fetched.NAME])
        raise UserError("no-such-name", flag, model_name_or_path, kind="built-in model", known=known)
    texts = MODELS[name].texts()
    fingerprint = hashlib.sha256(json.dumps([MODELS[name].version, texts]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{name}-{fingerprint}"
    fill_once(folder, partial(MODELS[name].build, texts))
    return str(folder)


def builtin_name(path: str) -> str:
    """The name of a built-in or fetched model in a folder, the same on every machine. Other paths are unchanged."""
    from indictune.models import fetched

    if Path(path) == fetched.fetched_folder():
        return fetched.NAME
    names = [name for name in MODELS if Path(path).parent == cache_folder() and Path(path).name.startswith(f"{name}-")]
    return f"{PREFIX}{names[0]}" if names else path
