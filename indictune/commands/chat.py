"""Talk to a trained language model in the terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import FinishedModelArguments, flag
from indictune.console_text import printable
from indictune.prediction.chat_model import ChatModel, TooLongError, open_chat_model

EXIT = "/exit"


@dataclass
class ChatFlags(FinishedModelArguments):
    """Which language model answers in the terminal, and how."""

    needed = ("model", "indictune chat FOLDER")

    model: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    max_new_tokens: int = flag(256, "Most tokens of an answer.")
    temperature: float = flag(0.0, "0 takes the likeliest token each time. Above 0 tokens are drawn; 1 is usual.")
    chat_template: str | None = flag(
        None,
        "How messages become text: llama3, llama2, chatml, tulu, plain or a .jinja file. Default: the training's.",
    )


def run_chat(flags: Mapping[str, list[str]]) -> int:
    """Answer what is typed until the user ends it."""
    model = open_chat_model(**vars(read_arguments(flags, ChatFlags, "model")))
    if sys.stdin.isatty():
        print(
            f"Type a message, {EXIT} or ctrl-D to end. A long answer is cut after --max_new_tokens.", file=sys.stderr
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers for old names
        try:
            for line in typed_lines():
                if line.strip() == EXIT:
                    break
                if line.strip():
                    answer(model, line.strip())
        except (KeyboardInterrupt, EOFError):
            print()
    return 0


def typed_lines() -> Iterator[str]:
    """The lines of a file or a pipe, or those typed at a terminal."""
    if not sys.stdin.isatty():
        cast(Any, sys.stdin).reconfigure(errors="replace")
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401, `input` then edits lines and remembers them
    while True:
        yield input("> ")


def answer(model: ChatModel, text: str) -> None:
    """Print the answer to a message word by word, without control characters."""
    try:
        said = model.answer(text, lambda piece: print(printable(piece), end="", flush=True))
    except TooLongError as error:
        print(error, file=sys.stderr)
        return
    print()
    if not said:
        print("(the model ended its answer at once)", file=sys.stderr)
