"""Problems in what the user gave, collected so that all of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from indictune.console_text import in_one_line


class UserError(Exception):
    """Something the user gave cannot work. It ends a run with exit code 2 and one message, without a traceback.

    Args:
        problems: one sentence a problem; each names what was given, what was expected and what to type instead.
            Line breaks in what was given are written out, so that no label can pass for a line of ours.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [in_one_line(each) for each in ([problems] if isinstance(problems, str) else problems)]
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The problem itself, or a numbered list where there are several."""
        if len(self.problems) == 1:
            return self.problems[0]
        numbered = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{len(self.problems)} problems:", *numbered])


class Problems(list[str]):
    """The problems found so far. Checks that do not depend on each other add to one list, which is raised once."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the problems of a `UserError` raised in the block, and go on after it.

        A later block may use what an earlier one would have made: where that was refused, the later one ends there.
        """
        try:
            yield
        except UserError as error:
            self.extend(problem for problem in error.problems if problem not in self)
        except UnboundLocalError:
            if not self:
                raise

    def raise_any(self) -> None:
        """Raise all problems in one `UserError`, if there are any."""
        if self:
            raise UserError(self)
