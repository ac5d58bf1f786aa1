"""Mutate valid files and read them: either a message to the user comes out, or texts that stand in the file.

python -m tests.fuzz_readers --minutes 10
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.reading import RECORD_EXTENSIONS, read_batches, read_records
from indictune.data.rejects import BadRows, Quarantine
from indictune.errors import UserError
from tests.data.test_round_trips import WRITERS

HANG_S = 20
TABLE = [('a, "b"\nक', "x"), ("", "1e5"), ("NA", "null"), ("😀 \\u0041", "-1"), ("c\td", "y")] * 3
PIECES = [
    *(b'"', b'""', b",", b"\t", b"\n", b"\r", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]"),
    *(b":", b"\\", b"\\u", b"\\ud83d", b"null", b"NaN", b"1e999", b"-", b"[" * 2000, b'{"text":', b'"data"', b"PAR1"),
]  # fmt: skip


def seeds(folder: Path) -> dict[str, bytes]:
    """Valid files by name."""
    made = {}
    for name, write in WRITERS.items():
        write(folder / name, TABLE)
        made[name] = (folder / name).read_bytes()
    rows = [{"text": text, "label": label} for text, label in TABLE]
    plain = [{"text": f"{text} क{index}", "label": "x"} for index, text in enumerate(["a", "NA", "1e5", "[,]"] * 3)]
    lines = [json.dumps(row, ensure_ascii=False) for row in plain]
    made["plain.jsonl"], made["plain.json"] = "\n".join(lines).encode(), f"[{', '.join(lines)}]".encode()
    made["data.json"] = json.dumps({"version": 1, "data": rows}).encode()
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", compression="none", use_dictionary=False)
    made["p.parquet"] = (folder / "p.parquet").read_bytes()
    return made


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The file with one to four changes."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice([0, 1, 1, 2, 8, 64]))
        change = chance.randrange(5)
        if change == 0:
            content = content[:at] + chance.choice(PIECES) + content[end:]
        elif change == 1:
            content = content[:at] + chance.randbytes(end - at) + content[end:]
        elif change == 2:
            content = content[:at] + content[end:]
        elif change == 3:
            content = content[:end] + content[at:]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    return content


def stands_in(text: str, content: bytes) -> bool:
    """Whether a text is written in a file, as it is or with doubled quotes."""
    return any(part.encode() in content for part in (text, text.replace('"', '""')))


def check(path: Path, folder: Path) -> str:
    """Read a file in all ways; returns how it went.

    Raises:
        AssertionError: a text came out that does not stand in the file.
    """
    outcome = "refused"
    for quarantine in (False, True):
        bad = Quarantine(str(path), 0.5, folder) if quarantine else BadRows(str(path))
        try:
            batches = list(read_batches(str(path), {"text": "text", "label": "label"}, {}, bad))
            bad.finish(sum(batch.num_rows for batch in batches))
        except UserError:
            continue
        outcome = "left out" if bad.count else "read"
        texts = {text for batch in batches for role in ("text", "label") for text in batch[role].to_pylist() if text}
        content = path.read_bytes()
        # Arrow's compressed pages do not show texts, and JSON writes them with escapes.
        if path.name != "t.parquet" and not (path.suffix in RECORD_EXTENSIONS[:2] and b"\\" in content):
            for text in texts:
                assert stands_in(text, content), f"{text!r} does not stand in the file"
    if path.suffix in RECORD_EXTENSIONS:
        with suppress(UserError):
            list(read_records(str(path), BadRows(str(path))))
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    outcomes: Counter[str] = Counter()
    ends = time.monotonic() + 60 * args.minutes
    folder = Path(tempfile.mkdtemp())  # it stays, because a crash leaves the file that caused it
    print(f"Files are in {folder}")
    valid = seeds(folder)
    while time.monotonic() < ends:
        kind = chance.choice(list(valid))
        path = folder / kind
        path.write_bytes(mutated(valid[kind], chance))
        signal.alarm(HANG_S)
        outcomes[f"{kind} {check(path, folder)}"] += 1
    signal.alarm(0)
    shutil.rmtree(folder)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:>9,}  {outcome}")


if __name__ == "__main__":
    main()
