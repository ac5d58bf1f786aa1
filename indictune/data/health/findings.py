"""What is found in the rows of a run, counted, with examples; texts of a wrong encoding among it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import BadRows
from indictune.data.columns import shortened

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


# The first bytes of Indic letters, emoji and Arabic letters in UTF-8, read as Windows-1252 or Latin-1; and the
# first two after a second such mistake. Few right texts have one, so that ftfy, which decides, reads few texts.
_SUSPECT = "à[\u00a4-\u00b7]|ð[Ÿ\u009f]|â[\u0098-\u009eš›œ˜™ž]|[ØÙ][\u00a1-\u00bf]|Ã[\u00a0 ]Â|Ã°Å"
_MEANT = re.compile("[\u0620-\u06ff\u0900-\u0dff\u2600-\u27bf\U0001f000-\U0001faff]")


class Mojibake:
    """Counts such texts, and keeps the first.

    Attributes:
        count: number of texts.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: tuple[int, str, str] | None = None

    def watching(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass batches on, and count the texts in their columns `text` and `line`."""
        for batch in batches:
            suspect = batch.filter(pc.fill_null(pc.match_substring_regex(batch["text"], _SUSPECT), False))
            for text, line in zip(suspect["text"].to_pylist(), suspect["line"].to_pylist(), strict=True):
                self._decode(text, line)
            yield batch

    def check(self, text: str, line: int) -> None:
        """Count the text of a row that begins on a line, if it is one of these."""
        if re.search(_SUSPECT, text):
            self._decode(text, line)

    def _decode(self, text: str, line: int) -> None:
        """Count a text whose other decoding has more Indic letters or emoji."""
        import ftfy  # slow

        mended = ftfy.fix_encoding(text)
        if mended != text and len(_MEANT.findall(mended)) > len(_MEANT.findall(text)):
            self.count += 1
            self._first = self._first or (line, text, mended)

    def findings(self, origin: str, rows: BadRows, of: int) -> list[Finding]:
        """What a run says of such texts; `rows`, which `origin` named, knows where lines stand. `of` were read."""
        if self._first is None:
            return []
        line, text, mended = self._first
        where = rows.location(line)
        example = f"{where}: {shortened(text)!r} should be {shortened(mended)!r}"
        note = (
            f"{origin} {rows.source}: {self.count:,} texts were decoded by the wrong encoding, first {where}. Read "
            "the source as UTF-8, or mend the texts with ftfy.fix_encoding."
        )
        return [Finding("mojibake", self.count, of, note, None, [example])]
