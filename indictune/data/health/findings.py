"""What is found in the rows of a run: something that several rows have, counted, with examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_EXAMPLES = 5
# Findings whose examples are texts or words of rows.
_WITH_TEXTS = ("mojibake", "unknown_tokens", "token_collisions", "label_sources")


@dataclass(frozen=True)
class Finding:
    """Something that some of the rows, words or tokens have.

    Attributes:
        name: of the kind, such as `near_duplicates`.
        count: how many have it.
        of: how many were looked at.
        note: a sentence for the user. It holds no text or word of a row, because model cards are public.
        language: of the rows; None for all languages.
        examples: the first few, which may hold texts and words of rows.
        warns: whether a run warns of it. Others are only listed.
    """

    name: str
    count: int
    of: int
    note: str
    language: str | None = None
    examples: list[str] = field(default_factory=list)
    warns: bool = True

    @property
    def share(self) -> float:
        """Of those that were looked at."""
        return self.count / max(self.of, 1)

    @property
    def in_full(self) -> str:
        """The note, and the texts and words of rows that it leaves out: for this machine, not for a model card."""
        has_texts = self.name in _WITH_TEXTS and self.examples
        return f"{self.note} Such as: {', '.join(self.examples)}." if has_texts else self.note

    def as_json(self) -> dict[str, Any]:
        """As `health.json` has it."""
        return {"name": self.name, "language": self.language, "share": self.share} | asdict(self)


class Found:
    """Notes for the user and findings, collected while rows are read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.findings: list[Finding] = []

    def facts(self) -> dict[str, Any]:
        """As `write_facts` stores them. The notes include the warnings."""
        return {
            "notes": self.notes + warning_notes(self.findings),
            "findings": [asdict(each) for each in self.findings],
        }


def findings_in(facts: Mapping[str, Any]) -> list[Finding]:
    """The findings among stored facts."""
    return [Finding(**each) for each in facts["findings"]]


def warning_notes(findings: Iterable[Finding]) -> list[str]:
    """The notes that a run warns of."""
    return [each.note for each in findings if each.warns]
