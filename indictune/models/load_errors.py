"""Explain to the user why a model cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError

from indictune.config.arguments import ModelArguments
from indictune.errors import Problem, UserError, problem

logger = logging.getLogger(__name__)

MODEL_FLAG = "--model_name_or_path"

# Errors that broken files raise while a model is made: a config.json can break any line of the model's code. Without
# RuntimeError, which torch raises when memory is short.
BROKEN = (AttributeError, KeyError, OSError, SafetensorError, TypeError, UnpicklingError, ValueError)

_OF_THE_HUB = {
    GatedRepoError: "model-gated",
    RevisionNotFoundError: "no-such-revision",
    RepositoryNotFoundError: "no-such-model",
}


@contextmanager
def explained(args: ModelArguments, *errors: type[Exception], flag: str = MODEL_FLAG) -> Iterator[None]:
    """Turn `errors` of reading a model's files into one user error, as `explanation` describes it."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        logger.debug("%s %s cannot be read", flag, args.model_name_or_path, exc_info=error)
        raise UserError(problems=[load_problem(args, error, flag)]) from error


def load_problem(args: ModelArguments, error: BaseException, flag: str = MODEL_FLAG) -> Problem:
    """The problem behind an error of reading the model that `args` names."""
    name = args.model_name_or_path
    given, folder = (flag, name), Path(name)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")):
        return problem("no-such-model-folder", *given)  # no name on the Hub is like that
    if folder.is_dir() and not (folder / "config.json").exists():
        inside = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        return problem("folder-without-model", *given, hint=hint)
    if "trust_remote_code" in str(error):
        return problem("model-needs-its-code", *given)
    is_pickled = any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("model*.safetensors"))
    if (is_pickled and isinstance(error, OSError)) or "Please do not set `use_safetensors=True`" in str(error):
        return problem("pickle-not-trusted", *given)
    causes = tuple(_causes(error))
    for kind, code in _OF_THE_HUB.items():
        if any(isinstance(cause, kind) for cause in causes):
            return problem(code, *given, revision=args.model_revision)
    if isinstance(error, OSError) and not folder.exists():
        return problem("model-not-found-offline", *given, reason=first_line(error))
    return problem("model-unreadable", *given, reason=first_line(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the next one after a colon; with the error's name if it helps."""
    lines = str(error).splitlines() or [""]
    text = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    explains_itself = text and isinstance(error, ImportError | OSError | ValueError)
    return text if explains_itself else f"{type(error).__name__}: {text}"
