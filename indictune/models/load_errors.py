"""What to tell a user whose model cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError

logger = logging.getLogger(__name__)

MODEL_FLAG = "--model_name_or_path"
SAFE = "model*.safetensors"
LOG_IN = "set HF_TOKEN or run `hf auth login`"
BRINGS_CODE = "the model brings its own Python code. If you trust its authors, give --trust_remote_code true."

IS_PICKLE = (
    "its weights are a pickle, which can run code when it is read. If you trust whoever wrote it, give "
    "--trust_checkpoint true; or take a copy with model.safetensors."
)


# What broken files raise when a model is made from them: a config.json can break any line of the model's code. Not
# RuntimeError, by which torch tells that there is no memory.
BROKEN = (AttributeError, KeyError, OSError, SafetensorError, TypeError, UnpicklingError, ValueError)


@contextmanager
def explained(args: ModelArguments, *errors: type[Exception], flag: str = MODEL_FLAG) -> Iterator[None]:
    """Turn `errors` of reading a model's files into one message that names the flag and the way out.

    Args:
        flag: what the user typed in front of the model's name.

    Raises:
        UserError: the block raised one of `errors`.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        logger.debug("%s %s cannot be read", flag, args.model_name_or_path, exc_info=error)
        raise UserError(explanation(args, error, flag)) from error


def explanation(args: ModelArguments, error: BaseException, flag: str = MODEL_FLAG) -> str:
    """One message for an error that came up while the model named in `args` was read."""
    name = args.model_name_or_path
    is_trained, flag = flag == MODEL_FLAG, f"{flag} {name}"
    causes = tuple(_chain(error))
    if Path(name).is_dir():
        return _folder_explanation(flag, Path(name), error)
    if _looks_like_path(name):
        return f"{flag}: there is no such folder. Give a folder with a saved model, or a model's name on the Hub."
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"{flag}: the model is gated. Ask for access at https://huggingface.co/{name}, then {LOG_IN}."
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        named = f"--model_revision {args.model_revision}: {name}" if is_trained else f"{flag}: it"
        return f"{named} has no branch, tag or commit {args.model_revision}."
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"{flag}: neither a folder nor a model on the Hub. Check the spelling; for a private model {LOG_IN}."
    if "trust_remote_code" in str(error):
        return f"{flag}: {BRINGS_CODE}"
    if "Please do not set `use_safetensors=True`" in str(error):
        return f"{flag}: {IS_PICKLE}"
    if isinstance(error, OSError):
        return (
            f"{flag}: not a folder here, not in the local Hub cache, and the Hub cannot be reached (or has no such "
            f"file). Check the spelling and the network, or give a folder; a `builtin:` model needs neither. "
            f"({first_line(error)})"
        )
    return f"{flag}: its files cannot be read as a model. ({first_line(error)})"


def _folder_explanation(flag: str, folder: Path, error: BaseException) -> str:
    if (folder / "adapter_config.json").exists():
        return f"{flag}: the folder holds an adapter. Give its base model, or a merged model. ({first_line(error)})"
    if not (folder / "config.json").exists():
        inside = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        return (
            f"{flag}: the folder has no config.json; expected a saved model "
            f"(config.json, model.safetensors and the tokenizer's files).{hint}"
        )
    if "trust_remote_code" in str(error):
        return f"{flag}: {BRINGS_CODE}"
    if isinstance(error, OSError) and any(folder.glob("pytorch_model*.bin")) and not any(folder.glob(SAFE)):
        return f"{flag}: {IS_PICKLE}"
    return f"{flag}: the folder's files cannot be read as a model. ({first_line(error)})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _looks_like_path(name: str) -> bool:
    """A Hub name is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def first_line(error: BaseException) -> str:
    """Of what an error says; with the next where that is announced, and the error's name where it says little."""
    lines = str(error).splitlines() or [""]
    said = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    return (
        said if said and isinstance(error, ImportError | OSError | ValueError) else f"{type(error).__name__}: {said}"
    )
