"""`indictune vocabulary extend`: give a model tokens for scripts that it splits badly."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import Files, ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import OneOrMore, RawTextForm, flag
from indictune.console_text import in_one_line, printable, shown_language, table
from indictune.data.cache import StoredRows
from indictune.data.documents import document_reader
from indictune.data.languages import NO_LETTERS, script_of
from indictune.data.load_rows import load_documents
from indictune.data.read.row_sources import file_source
from indictune.errors import Problem, Problems, UserError, problem
from indictune.models.atomic_folder import check_output_folder, match_config_mode, whole_folder
from indictune.models.load import read_config, read_tokenizer, read_weights
from indictune.models.vocabulary_growth import MIN_TEXTS, form_of, grow_embeddings, learn_pieces, with_pieces

_TRIED = 1_000  # texts whose tokens are compared
_SHOWN = 30  # characters of a text


@dataclass
class VocabularyFlags(RawTextForm):
    """Which model gets how many tokens, and from which texts it learns them."""

    needed = ("model", "indictune vocabulary extend MODEL --train_file F --tokens N --output_dir D")

    model: str = flag("", "A Hub name or a folder. May be given as a bare word after `extend`.")
    model_revision: str = flag("main", "Branch, tag or commit of the model on the Hub.")
    train_file: Files = flag(None, "Files of raw text: txt, or rows with a text.", nargs="+", action=OneOrMore)
    tokens: int = flag(5_000, "Most tokens to add. Each is in five different texts.")
    min_tokens_per_word: float = flag(
        2.0, "Learn tokens of scripts whose words have at least this many tokens on average."
    )
    output_dir: str = flag("", "Gets the model and its tokenizer. Must not exist, or be empty.")

    def check(self) -> Iterator[Problem]:
        """Refuse no texts and no folder."""
        yield from super().check()
        for name in ("train_file", "output_dir"):
            if not getattr(self, name):
                yield problem("argument-missing", f"--{name}", usage=self.needed[1])


def run_vocabulary(flags: Mapping[str, list[str]]) -> int:
    """Write the model with the new tokens, and print how many tokens words have before and after."""
    action, *named_models = flags.get("") or ["(nothing)"]
    if action != "extend":
        raise UserError("no-such-name", "vocabulary", action, kind="action", known="extend")
    given = {**flags, "": named_models}
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
    assert form is not None
    before = _counts(documents, old)
    scripts = {script for (_, script), of in before.items() if of["tokens"] >= args.min_tokens_per_word * of["words"]}
    scripts -= {NO_LETTERS}
    pieces = learn_pieces(documents.texts, old, form, lambda word: script_of(word) in scripts, args.tokens)
    if not pieces:
        listed = ", ".join(sorted(scripts)) or "there is none"
        raise UserError("no-pieces-learned", "--train_file", args.train_file, texts=MIN_TEXTS, scripts=listed)
    new = with_pieces(old, form, pieces)
    parts = {new.convert_tokens_to_ids(text): ids for text, ids in pieces.items()}
    kind: Any = getattr(transformers, str((config.architectures or ["AutoModel"])[0]), AutoModel)
    torch.manual_seed(0)  # of weights that the files lack, such as a pooler
    model, _ = read_weights(kind, named, config, cast(Any, config.dtype or torch.float32), "--model")
    grow_embeddings(model, parts)
    size_bytes = sum(each.nbytes for each in model.parameters())
    with whole_folder(Path(args.output_dir), "--output_dir", size_bytes) as folder:
        model.save_pretrained(folder)
        new.save_pretrained(folder)
        match_config_mode(folder)
        after = read_tokenizer(ModelArguments(str(folder)), "--output_dir")
        _check_grown(documents.texts, old, after, {*parts})
    print(printable(f"{_tokens_table(before, _counts(documents, after))}\n"))
    print(printable(f"{args.output_dir}: {args.model} with {len(parts):,} more tokens."))
    return 0


def _documents(args: VocabularyFlags) -> StoredRows:
    source = file_source(args.train_file or [], "--train_file", document_reader(args), "train")
    found = load_documents({"train": source}, args, (), cleans=False)
    for note in found.notes:
        print(in_one_line(f"warning: {note}"), file=sys.stderr)
    return found.rows["train"]


Counts = dict[tuple[str, str], Counter[str]]


def _counts(documents: StoredRows, tokenizer: Tokenizer) -> Counts:
    """Texts, words and tokens of each language and script."""
    found = defaultdict[tuple[str, str], Counter[str]](Counter)
    for language, text in zip(documents.table["language"].to_pylist(), documents.texts, strict=True):
        of_text = {"texts": 1, "words": len(text.split()), "tokens": len(_ids(text, tokenizer))}
        found[language, script_of(text)].update(of_text)
    return found


def _ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokens_table(before: Counts, after: Counts) -> str:
    rows = []
    for (language, script), of in sorted(before.items()):
        tokens = of["tokens"], after[language, script]["tokens"]
        ratios = (f"{each / max(of['words'], 1):.2f}" for each in tokens)
        rows.append([shown_language(language), script, f"{of['texts']:,}", *ratios])
    return table(["language", "script", "texts", "tokens a word before", "after"], rows)


def _check_grown(texts: Iterable[str], old: Tokenizer, new: Tokenizer, added: set[int]) -> None:
    """Refuse a tokenizer that reads texts without new pieces otherwise, or decodes to something else."""
    for text in islice(texts, _TRIED):
        before, ids = _ids(text, old), _ids(text, new)
        if (before != ids and added.isdisjoint(ids)) or new.decode(ids) != old.decode(before):
            reason = f"with new pieces it would read {text[:_SHOWN]!r} otherwise than they are written"
            raise UserError("tokenizer-cannot-grow", "--model", old.name_or_path, reason=reason)
