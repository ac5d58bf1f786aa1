"""The built-in small encoder with a vocabulary that is learned from a run's training texts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from indictune.cache_folders import cache_folder
from indictune.config.arguments import ModelArguments
from indictune.errors import Problem, UserError, problem
from indictune.models import builtin, tiny_models
from indictune.models.load import load_tokenizer

logger = logging.getLogger(__name__)

NAME = "tiny-indic-bert"
MIN_FREQUENCY = 2  # else few texts give whole words, and new texts with other words look unlike them
FLAG = "--vocabulary_from_train"


def check_learned_vocabulary(args: ModelArguments) -> list[Problem]:
    """Refuse to learn the vocabulary of a model that has its own, or of a base that an adapter refers to."""
    is_small_encoder = args.model_name_or_path == f"{builtin.PREFIX}{NAME}" and args.method == "full"
    if args.vocabulary_from_train is None or is_small_encoder:
        return []
    details = {"model": args.model_name_or_path, "method": args.method}
    return [problem("vocabulary-not-learned", FLAG, args.vocabulary_from_train, **details)]


def with_vocabulary(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], checkpoint: Path | None
) -> tuple[ModelArguments, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a run: those given, unless `--vocabulary_from_train` makes others.

    Args:
        args: name the model.
        tokenizer: of that model.
        texts: the cleaned training texts, which are read several times.
        checkpoint: that the run resumes from, whose vocabulary is kept. None: one process learns it from the texts.
            Where nodes share no cache, one of each node does: the same texts give the same vocabulary.

    Raises:
        UserError: the checkpoint has no such vocabulary, or the cache cannot be written.
    """
    if args.vocabulary_from_train is None:
        return args, tokenizer
    size = tiny_models.Size(vocab_size=args.vocabulary_from_train)
    stored = None if checkpoint is None else stored_vocabulary(checkpoint)
    digest = hashlib.sha256(
        json.dumps([builtin.MODELS[NAME].version, size.vocab_size, MIN_FREQUENCY, stored]).encode()
    )
    for text in texts if stored is None else ():
        digest.update(f"{text}\n".encode())

    def build(folder: Path) -> None:
        vocabulary = tiny_models.learn_vocabulary(texts, size.vocab_size, MIN_FREQUENCY) if stored is None else stored
        tiny_models.build_with(vocabulary, folder, size)

    folder = cache_folder() / f"{NAME}-{digest.hexdigest()[:16]}"
    builtin.build_model_once(folder, build)
    made = replace(args, model_name_or_path=str(folder), vocabulary_from_train=None)
    tokenizer = load_tokenizer(made)
    came_from = "the training texts" if checkpoint is None else checkpoint.name
    logger.info("vocabulary: %s entries from %s", f"{len(tokenizer):,}", came_from)
    return made, tokenizer


def stored_vocabulary(checkpoint: Path) -> dict[str, int]:
    """Token -> id of the tokenizer in a checkpoint.

    Raises:
        UserError: it cannot be read.
    """
    path = checkpoint / "tokenizer.json"
    try:
        vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError("unreadable", "--resume_from_checkpoint", path, reason=type(error).__name__) from error
    return vocabulary
