"""User errors: each has a code, the flag and value at fault, and a way out. `errors.toml` holds the wording."""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeVar

from indictune.console_text import in_one_line

Made = TypeVar("Made")


@cache
def catalogue() -> dict[str, dict[str, str]]:
    """Code -> `problem` and `way_out`, templates for `str.format` over the details of a problem."""
    content: dict[str, dict[str, str]] = tomllib.loads(
        resources.files("indictune").joinpath("errors.toml").read_text(encoding="utf-8")
    )
    return content


def in_capitals(template: str) -> str:
    """A template of the catalogue, with the name of each placeholder in capitals."""
    parts = ((text, name or "") for text, name, _, _ in string.Formatter().parse(template))
    return "".join(text + name.upper().replace("_", " ") for text, name in parts)


def linked(text: str, stream: TextIO) -> str:
    """The same text. On a terminal, the code at the end of a line opens its entry of docs/errors.md in a checkout."""
    page = Path(__file__).resolve().parents[1] / "docs/errors.md"
    if not stream.isatty() or not page.is_file():
        return text
    begin, end = f"\033]8;;{page.as_uri()}#", "\033\\"  # OSC 8
    return re.sub(r"\[([a-z0-9-]+)\]$", lambda code: f"{begin}{code[1]}{end}{code[0]}\033]8;;{end}", text, flags=re.M)


@dataclass(frozen=True)
class Problem:
    """One thing the user gave that cannot work.

    Args:
        code: key in `errors.toml`.
        flag: at fault, as the user types it (`--seed`), or the file or recipe key.
        value: that the flag has.
        way_out: what to type instead; None takes the catalogue's.
        details: fill the other placeholders of the catalogue's templates.
    """

    code: str
    flag: str = ""
    value: Any = None
    way_out: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """The problem, the way out and the code, on one line."""
        text = catalogue()[self.code]["problem"].format(**self._given).strip()
        return in_one_line(" ".join(filter(None, [text, self.cure, f"[{self.code}]"])))

    @property
    def cure(self) -> str:
        """The way out alone."""
        template = catalogue()[self.code].get("way_out", "")
        return template.format(**self._given) if self.way_out is None else self.way_out

    @property
    def _given(self) -> dict[str, Any]:
        return {"flag": self.flag, "value": self.value, **self.details}


def problem(code: str, flag: str = "", value: Any = None, way_out: str | None = None, **details: Any) -> Problem:
    """A problem, its details given by name."""
    return Problem(code, flag, value, way_out, details)


def missing_extra(flag: str, value: object, extra: str, *packages: str) -> list[Problem]:
    """The problem of a value whose extra is not installed; none if all its packages are."""
    missing = [name for name in packages if find_spec(name) is None]
    return [problem("extra-missing", flag, value, extra=extra, packages=", ".join(missing))] if missing else []


class UserError(Exception):
    """Something the user gave cannot work. The run exits with code 2 and one message, without a traceback.

    Args:
        code: and the rest, as for `problem`: the one problem that there is.
        problems: instead of a code, where there are several.
    """

    def __init__(
        self,
        code: str = "",
        flag: str = "",
        value: Any = None,
        way_out: str | None = None,
        *,
        problems: Sequence[Any] = (),
        **details: Any,
    ) -> None:
        self.problems: list[Problem] = list(problems) or [Problem(code, flag, value, way_out, details)]
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Callable[[], UserError], tuple[()]]:
        """Pickle the problems: worker processes raise user errors too."""
        return partial(UserError, problems=self.problems), ()

    @property
    def code(self) -> str:
        """The code of the first problem."""
        return self.problems[0].code

    @property
    def flag(self) -> str:
        """The flag of the first problem."""
        return self.problems[0].flag

    @property
    def message(self) -> str:
        """The problem itself, or a numbered list where there are several."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        numbered = [f"  {number}. {each}" for number, each in enumerate(self.problems, 1)]
        return "\n".join([f"{len(self.problems)} problems:", *numbered])


@contextmanager
def attributed_to(flag: str) -> Iterator[None]:
    """Name `flag` in the problems raised in the block that name none.

    Readers of files know the place of a problem, but not the flag that named the file.
    """
    try:
        yield
    except UserError as error:
        raise UserError(problems=[replace(each, flag=each.flag or flag) for each in error.problems]) from error


class Problems(list[Problem]):
    """The problems found so far. Independent checks add to one list, which is raised once."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the problems of a `UserError` raised in the block, and continue after it."""
        try:
            yield
        except UserError as error:
            self.extend(each for each in error.problems if each not in self)

    def attempt(self, make: Callable[..., Made], *args: Any, **named: Any) -> Made | None:
        """What `make` returns, or None where it raised a `UserError`, whose problems are kept."""
        with self.collecting():
            return make(*args, **named)
        return None

    def raise_any(self) -> None:
        """Raise all problems in one `UserError`, if there are any."""
        if self:
            raise UserError(problems=self)


def problems_of(check: Callable[..., object], *args: Any, **named: Any) -> list[Problem]:
    """The problems that a check raises in a `UserError`; empty where it passes."""
    found = Problems()
    found.attempt(check, *args, **named)
    return found
