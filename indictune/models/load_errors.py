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


@contextmanager
def explained(args: ModelArguments, *errors: type[Exception], flag: str = MODEL_FLAG) -> Iterator[None]:
    """Turn `errors` of reading a model's files into one user error.

    Args:
        args: name the model.
        errors: to explain; a `UserError` passes as it is.
        flag: in front of the model's name in the message.

    Raises:
        UserError: as `explanation`.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        logger.debug("%s %s cannot be read", flag, args.model_name_or_path, exc_info=error)
        raise UserError(problems=[explanation(args, error, flag)]) from error


def explanation(args: ModelArguments, error: BaseException, flag: str = MODEL_FLAG) -> Problem:
    """The problem behind an error of reading the model that `args` names."""
    name = args.model_name_or_path
    if Path(name).is_dir():
        return _folder_explanation(flag, Path(name), error)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/"):  # no Hub name
        return problem("no-such-model-folder", flag, name)
    causes = tuple(_causes(error))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return problem("model-gated", flag, name)
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return problem("no-such-revision", flag, name, revision=args.model_revision)
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return problem("no-such-model", flag, name)
    if "trust_remote_code" in str(error):
        return problem("model-needs-its-code", flag, name)
    if "Please do not set `use_safetensors=True`" in str(error):
        return problem("pickle-not-trusted", flag, name)
    if isinstance(error, OSError):
        return problem("model-not-found-offline", flag, name, reason=first_line(error))
    return problem("model-unreadable", flag, name, reason=first_line(error))


def _folder_explanation(flag: str, folder: Path, error: BaseException) -> Problem:
    if (folder / "adapter_config.json").exists():
        return problem("adapter-as-model", flag, folder)
    if not (folder / "config.json").exists():
        inside = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        return problem("folder-without-model", flag, folder, hint=hint)
    if "trust_remote_code" in str(error):
        return problem("model-needs-its-code", flag, folder)
    has_safetensors = any(folder.glob("model*.safetensors"))
    if isinstance(error, OSError) and any(folder.glob("pytorch_model*.bin")) and not has_safetensors:
        return problem("pickle-not-trusted", flag, folder)
    return problem("model-unreadable", flag, folder, reason=first_line(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the next one after a colon.

    The name of the error comes first where the message alone says little.
    """
    lines = str(error).splitlines() or [""]
    text = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    explains_itself = text and isinstance(error, ImportError | OSError | ValueError)
    return text if explains_itself else f"{type(error).__name__}: {text}"
