"""Find texts that were decoded by a wrong encoding, and texts whose letters are written as escapes."""

from __future__ import annotations

import re
from functools import cache

import pyarrow.compute as pc

from indictune.data.bad_rows import BadRows, Batches
from indictune.data.cache import StoredRows, text_keys
from indictune.data.columns import shortened
from indictune.data.health.findings import Finding, repeated_rows

# The first bytes of Indic and Arabic letters, emoji and quotes in UTF-8, read as Windows-1252 or Latin-1, and two such
# mistakes in a row. Few right texts have one, so that ftfy, which decides, reads few texts.
_SUSPECT = "à[\u00a4-\u00b7]|ð[Ÿ\u009f]|â[\u0080\u0098-\u009e€š›œ˜™ž]|[ØÙ][\u00a1-\u00bf]|Ã[\u00a0 ]Â|Ã°Å"
_SIGNS = "\U0001f000-\U0001faff\u2013-\u2026"  # emoji, dashes, quotes and dots
_MEANT = re.compile(f"[\u0620-\u06ff\u0900-\u0dff\u2600-\u27bf{_SIGNS}]")
_LETTERS = 4  # so many that texts of another language give them by no chance

# Other encodings that UTF-8 was read by. ftfy fills the gaps of its sloppy ones.
_ENCODINGS = (
    *("cp437", "cp850", "cp852", "cp866", "koi8-r", "mac-roman", "iso8859-15", "cp932", "gb18030"),
    *("sloppy-windows-1250", "sloppy-windows-1251", "sloppy-windows-1253"),
)
# First bytes of Indic letters, quotes, emoji and Arabic letters, and those that may follow.
_BYTES = {0xE0: range(0xA4, 0xB8), 0xE2: (0x80,), 0xF0: (0x9F,)} | dict.fromkeys(range(0xD8, 0xDC), range(0x80, 0xC0))

# `str` of bytes as pandas writes them; letters as `json.dumps` and `repr` do: in code, behind a quote or a bracket.
_LITERAL = re.compile(r"""\s*b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*""", re.DOTALL)
_LETTER = r"\\U0001[0-9a-fA-F]{4}|(?:\\u[0-9a-fA-F]{4}){2}|(?:\\x[89a-fA-F][0-9a-fA-F]){3}"
_ESCAPES = rf"""(?:^|[^\\'"`\[])(?:{_LETTER})"""


@cache
def _suspects() -> dict[str, str]:
    """For each of the encodings, a pattern of what it makes of the first bytes of letters."""
    import ftfy.bad_codecs  # noqa: F401 - the sloppy encodings

    patterns = {}
    for encoding in _ENCODINGS:
        pairs = (bytes([first, second]) for first, seconds in _BYTES.items() for second in seconds)
        read = {pair.decode(encoding, errors="ignore") for pair in pairs} - {""}
        lasts: dict[str, str] = {}
        for pair in sorted(read):
            lasts[pair[:-1]] = lasts.get(pair[:-1], "") + re.escape(pair[-1])
        patterns[encoding] = "|".join(f"{re.escape(first)}[{of_first}]" for first, of_first in lasts.items())
    return patterns


def _decoded(text: str, encoding: str) -> str | None:
    """A text that was UTF-8 and was read by an encoding; None if it seems to be right as it is.

    By chance, a few words such as the Russian "рок" are a letter, but no emoji, and no letters with signs between.
    """
    mended = text.encode(encoding, errors="replace").decode("utf-8", errors="replace")
    words = re.findall(r"[^\x00-\x7f]+", text)
    are_words = all(word.isalpha() and word in (word.lower(), word.upper(), word.title()) for word in words)
    letters = len(_MEANT.findall(mended))
    are_many = letters >= (_LETTERS if are_words else 2) or re.search(f"[{_SIGNS}]", mended) is not None
    return mended if are_many and letters >= mended.count("\ufffd") else None


def _mended(text: str) -> tuple[str, str] | None:
    """A text as it was before a wrong decoding, and the call that mends it; None if it seems to be right."""
    if re.search(_SUSPECT, text):
        import ftfy  # slow

        mended = ftfy.fix_encoding(text)
        if mended != text and len(_MEANT.findall(mended)) > len(_MEANT.findall(text)):
            return mended, "ftfy.fix_encoding"
    for encoding, pattern in _suspects().items():
        if re.search(pattern, text) and (decoded := _decoded(text, encoding)):
            cure = f'text.encode("{encoding.removeprefix("sloppy-")}").decode("utf-8")'
            return decoded, "" if "\ufffd" in decoded else cure
    return None


class DamagedTexts:
    """Counts texts that were decoded by a wrong encoding, or whose letters are escapes, and keeps the first ones."""

    def __init__(self) -> None:
        self.mojibake = self.escaped = 0
        self.cure = ""  # the call that mends the first text of a wrong encoding
        self._first: dict[str, tuple[int, str]] = {}  # by name of the finding: a line, and what it holds

    def watching(self, batches: Batches) -> Batches:
        """Pass batches on, and count the texts in their columns `text` and, of pairs, `text_pair`."""
        pattern = "|".join([_SUSPECT, r"^\s*b['\"]", _ESCAPES, *_suspects().values()])
        for batch in batches:
            for column in (name for name in ("text", "text_pair") if name in batch.schema.names):
                suspect = batch.filter(pc.fill_null(pc.match_substring_regex(batch[column], pattern), False))
                for text, line in zip(suspect[column].to_pylist(), suspect["line"].to_pylist(), strict=True):
                    self.check(text, line)
            yield batch

    def check(self, text: str, line: int) -> None:
        """Count the text of a row that begins on a line, if it is one of these."""
        if _LITERAL.fullmatch(text) or re.search(_ESCAPES, text):
            self.escaped += 1
            self._first.setdefault("escaped_texts", (line, repr(shortened(text))))
        elif not text.isascii() and (found := _mended(text)):
            self.mojibake += 1
            self.cure = self.cure or found[1]
            self._first.setdefault("mojibake", (line, f"{shortened(text)!r} should be {shortened(found[0])!r}"))

    def findings(self, origin: str, rows: BadRows | StoredRows, of: int) -> list[Finding]:
        """What a run says of such texts; `rows`, which `origin` named, knows where lines stand. `of` were read."""
        mend = f"Read the source as UTF-8{self.cure and f', or mend the texts with {self.cure}'}."
        unescape = "Decode them where they were written, such as by ast.literal_eval or json.loads."
        escapes = r"are b'...' of Python, or have escapes such as \u0939 for letters"
        kinds = {
            "mojibake": (self.mojibake, "were decoded by the wrong encoding", mend),
            "escaped_texts": (self.escaped, escapes, unescape),
        }
        found = []
        for name, (line, held) in self._first.items():
            (count, fault, cure), where = kinds[name], rows.location(line)
            note = f"{origin} {rows.source}: {count:,} texts {fault}, first {where}. {cure}"
            found.append(Finding(name, count, of, note, None, [f"{where}: {held}"]))
        return found


def findings_of_split(rows: StoredRows) -> list[Finding]:
    """Repeated and damaged texts of a split that was read as a whole."""
    damaged = DamagedTexts()
    for number, text in enumerate(rows.texts):
        damaged.check(text, number)
    repeated = repeated_rows(rows, text_keys(rows.texts))
    return [*([repeated] if repeated.count else []), *damaged.findings(rows.origin, rows, len(rows))]
