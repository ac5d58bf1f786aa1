"""What doctor says: one line a check, with a status, what was found, and the cure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from indictune.errors import Problem

Status = Literal["ok", "warn", "fail"]

_INDENT = " " * 22
_WIDTH = 118


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    check: str
    status: Status  # `warn` is a run that is slow or may fail; `fail` is one that cannot be right
    found: str  # what was seen
    cure: str = ""  # what to do; empty for `ok`
    stack: tuple[str, ...] = ()  # of a rank that did not come, innermost call last; empty for other checks

    def text(self) -> str:
        """The line for the console, with the stack and the cure below it."""
        first = f"{self.status:<6}{self.check:<16}{self.found}"
        stack = [f"{_INDENT}{each}" for each in self.stack]
        cure = textwrap.wrap(self.cure, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        return "\n".join([first, *stack, *cure])


def of_problem(check: str, problem: Problem) -> Outcome:
    """A problem of the user's as a line."""
    return Outcome(check, "fail", str(replace(problem, way_out="")), problem.cure)


def merged(by_rank: Sequence[Sequence[Outcome]], hosts: Sequence[str]) -> list[Outcome]:
    """The lines of all ranks, check by check: each once, with the ranks that have it unless all have.

    Of a check that is ok everywhere, the line of the first rank stays.
    """
    checks = list(dict.fromkeys(line.check for lines in by_rank for line in lines))
    found = []
    for check in checks:
        ranks: dict[Outcome, list[int]] = {}
        for rank, lines in enumerate(by_rank):
            for line in lines:
                if line.check == check:
                    ranks.setdefault(line, []).append(rank)
        bad = {line: who for line, who in ranks.items() if line.status != "ok"}
        for line, who in bad.items():
            text = line.found if len(who) == len(by_rank) else f"{named_ranks(who, hosts)}: {line.found}"
            found.append(replace(line, found=text))
        found += [] if bad else list(ranks)[:1]
    return found


def named_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks as a message has them, with their host where there are several."""
    numbers = ", ".join(map(str, ranks))
    on = sorted({hosts[rank] for rank in ranks})
    where = f" on {', '.join(on)}" if len(set(hosts)) > 1 else ""
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{where}"


def exit_code(lines: Iterable[Outcome]) -> int:
    """1 if a check failed, else 0."""
    return int(any(line.status == "fail" for line in lines))
