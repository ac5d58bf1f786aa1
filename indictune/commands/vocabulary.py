"""`indictune vocabulary extend`: give a model tokens for scripts that it splits badly."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import Files, ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import OneOrMore, RawTextForm, flag
from indictune.console_text import in_one_line, printable, shown_language, table
from indictune.data.cache import StoredRows
from indictune.data.documents import document_reader, load_documents
from indictune.data.languages import NO_LETTERS, script_of
from indictune.data.read.row_sources import file_source
from indictune.data.text.learned_pieces import MIN_TEXTS, learn_pieces
from indictune.errors import Problem, Problems, UserError, problem
from indictune.models.atomic_folder import check_output_folder, match_config_mode, whole_folder
from indictune.models.load import read_config, read_tokenizer, read_weights
from indictune.models.vocabulary_growth import form_of, grow_embeddings, with_pieces

_TRIED = 1_000  # texts whose tokens are compared
_AT_ONCE = 1_000
_SHOWN = 30  # characters of a text


@dataclass
class VocabularyFlags(RawTextForm):
    """Which model gets how many tokens, and from which texts it learns them."""

    needed = ("model", "indictune vocabulary extend --model M --train_file F --tokens N --output_dir D")

    model: str = flag("", "A Hub name or a folder.")
    model_revision: str = flag("main", "Branch, tag or commit of the model on the Hub.")
    train_file: Files = flag(None, "Files of raw text: txt, or rows with a text.", nargs="+", action=OneOrMore)
    tokens: int = flag(5_000, "Most tokens to add. Each is in five different texts.")
    min_tokens_per_word: float = flag(
        2.0, "Learn tokens of scripts whose words have at least this many tokens on average."
    )
    output_dir: str = flag("", "Gets the model and its tokenizer. Must not exist, or be empty.")

    def check(self) -> Iterator[Problem]:
        """Refuse no texts, no folder, and no tokens."""
        yield from super().check()
        for name in ("train_file", "output_dir"):
            if not getattr(self, name):
                yield problem("argument-missing", f"--{name}", usage=self.needed[1])
        if self.tokens < 1:
            yield problem("expected-at-least", "--tokens", self.tokens, smallest=1)


def run_vocabulary(flags: Mapping[str, list[str]]) -> int:
    """Write the model with the new tokens, and print how many tokens words have before and after."""
    given = dict(flags)
    if (action := " ".join(given.pop("", []))) != "extend":
        raise UserError("no-such-name", "vocabulary", action or "(nothing)", kind="action", known="extend")
    args = read_arguments(given, VocabularyFlags, "model")
    named = ModelArguments(args.model, model_revision=args.model_revision, device_map="cpu")
    problems = Problems()
    problems.attempt(check_output_folder, Path(args.output_dir), "--output_dir")
    old = problems.attempt(read_tokenizer, named, "--model")
    form = None if old is None else problems.attempt(form_of, old, args.model)
    config = problems.attempt(read_config, named, "--model")
    documents = problems.attempt(_documents, args)
    problems.raise_any()
    assert old is not None
    assert config is not None
    assert documents is not None
    badly = _split_badly(documents.texts, old, args.min_tokens_per_word)
    pieces = learn_pieces(documents.texts, old, args.tokens, lambda word: script_of(word) in badly, cast(Any, form))
    if not pieces:
        named_files, scripts = ("--train_file", args.train_file), ", ".join(sorted(badly)) or "there is none"
        raise UserError("no-pieces-learned", *named_files, texts=MIN_TEXTS, scripts=scripts)
    new = deepcopy(old)
    parts = with_pieces(new, pieces, str(form))
    named_class = getattr(transformers, str((config.architectures or [""])[0]), None)
    is_model = isinstance(named_class, type) and issubclass(named_class, PreTrainedModel)
    kind: Any = named_class if is_model else AutoModel
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    torch.manual_seed(0)  # of weights that the files lack, such as a pooler
    model, _ = read_weights(kind, named, config, dtype, "--model")
    grow_embeddings(model, parts)
    size_bytes = sum(each.nbytes for each in model.parameters())
    with whole_folder(Path(args.output_dir), "--output_dir", size_bytes) as folder:
        model.save_pretrained(folder)
        new.save_pretrained(folder)
        match_config_mode(folder)
        after = read_tokenizer(ModelArguments(str(folder)), "--output_dir")
        _check_grown(documents.texts, old, new, after, {*parts})
    counts = [_counts(documents, tokenizer) for tokenizer in (old, after)]
    print(printable(f"{_tokens_table(*counts)}\n\n{args.output_dir}: {args.model} with {len(parts):,} more tokens."))
    return 0


def _documents(args: VocabularyFlags) -> StoredRows:
    source = file_source(cast(Any, args.train_file), "--train_file", document_reader(args), "train")
    found = load_documents({"train": source}, args, (), cleans=False)
    for note in found.notes:
        print(in_one_line(f"warning: {note}"), file=sys.stderr)
    return found.rows["train"]


def _ids(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each text, without special ones."""
    rest = iter(texts)
    while some := list(islice(rest, _AT_ONCE)):
        settings: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        yield from tokenizer(some, **settings)["input_ids"]


def _split_badly(texts: Iterable[str], tokenizer: Tokenizer, least: float) -> set[str]:
    """The scripts whose words have at least so many tokens on average, each distinct word counted once."""
    words = sorted({word for text in texts for word in text.split()})
    tokens, count = Counter[str](), Counter[str]()
    for word, ids in zip(words, _ids(words, tokenizer), strict=True):
        script = script_of(word)
        tokens[script] += len(ids)
        count[script] += 1
    return {script for script in count if script != NO_LETTERS and tokens[script] >= least * count[script]}


Counts = dict[tuple[str, str], list[int]]


def _counts(documents: StoredRows, tokenizer: Tokenizer) -> Counts:
    """Texts, words and tokens of each language and script of the texts."""
    found = defaultdict[tuple[str, str], list[int]](lambda: [0, 0, 0])
    languages = documents.table["language"].to_pylist()
    for language, text, ids in zip(languages, documents.texts, _ids(documents.texts, tokenizer), strict=True):
        for at, number in enumerate((1, len(text.split()), len(ids))):
            found[language, script_of(text)][at] += number
    return found


def _tokens_table(before: Counts, after: Counts) -> str:
    rows = []
    for (language, script), (texts, words, tokens) in sorted(before.items()):
        ratios = (f"{each / max(words, 1):.2f}" for each in (tokens, after[language, script][2]))
        rows.append([shown_language(language), script, f"{texts:,}", *ratios])
    return table(["language", "script", "texts", "tokens a word before", "after"], rows)


def _check_grown(texts: Iterable[str], old: Tokenizer, new: Tokenizer, read: Tokenizer, added: set[int]) -> None:
    """Refuse a tokenizer that is read otherwise than it was made, or changes other texts or what is decoded."""
    sample = list(islice(texts, _TRIED))
    for text, before, made, ids in zip(sample, *(_ids(sample, each) for each in (old, new, read)), strict=True):
        kept = before == ids or not added.isdisjoint(ids)
        if made != ids or not kept or read.decode(ids) != old.decode(before):
            reason = f"with new pieces it would read {text[:_SHOWN]!r} otherwise than they are written"
            raise UserError("tokenizer-cannot-grow", "--model", old.name_or_path, reason=reason)
