"""Talk to a trained language model in the terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from indictune.config.command_arguments import TalkArguments
from indictune.config.recipe import read_arguments
from indictune.console_text import printable
from indictune.training.talker import Talker, TooLongError, open_model

EXIT = "/exit"


def chat_command(argv: Sequence[str]) -> int:
    """`indictune chat FOLDER [flags]`; returns the exit code.

    Raises:
        UserError: every problem of the flags, or as `open_model`.
    """
    talker = open_model(read_arguments(argv, TalkArguments, "--model"))
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
                    answer(talker, line.strip())
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


def answer(talker: Talker, text: str) -> None:
    """Print the answer to a message word by word, without control characters."""
    try:
        said = talker.answer(text, lambda piece: print(printable(piece), end="", flush=True))
    except TooLongError as error:
        print(error, file=sys.stderr)
        return
    print()
    if not said:
        print("(the model ended its answer at once)", file=sys.stderr)
