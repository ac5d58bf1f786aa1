"""Files of a run and of the cache: their names, how they are locked, and written whole or not at all."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml
from filelock import FileLock, Timeout

from indictune.errors import UserError
from indictune.run import OWN_PROGRESS

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # of a checkpoint: what it holds, and nothing else may be there
_OF_A_CHECKPOINT = (MANIFEST, "trainer_state.json")  # both: other programs have a manifest.json too

PACKED = (".gz", ".zst")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_CLOSED = REFUSED | {errno.ENOTDIR, errno.EEXIST}
_SOON_S = 1.0  # in which whoever only looks at a lock has released it


def kind_of_file(path: str | Path) -> str:
    """The extension that says how a file is read, in lower case: `.csv` of `a.csv.gz`."""
    file = Path(path)
    return Path(file.stem).suffix.lower() if file.suffix.lower() in PACKED else file.suffix.lower()


def cache_folder() -> Path:
    """The folder of built-in models and prepared rows: `$INDICTUNE_CACHE`, or `~/.cache/indictune`."""
    return Path(os.environ.get("INDICTUNE_CACHE") or "~/.cache/indictune").expanduser()


_LARGE_BYTES = 100_000_000  # which take a tenth of a second to read
_SETTLED_S = 2.0  # after which a change of a file also changes its time


def content_digest(path: str | Path) -> str:
    """Digest of the bytes of a file. An unreadable file has a digest too: reading it later reports the problem.

    A process reads a file again only if it has changed, or changed so lately that its time may not tell.
    """
    try:
        status = os.stat(path)
        if time.time() - status.st_ctime < _SETTLED_S:
            return _digest_of.__wrapped__(str(path))
        return _digest_of(str(path), status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    except OSError as error:
        return f"unreadable: {error}"


def known_digest(path: str) -> str:
    """As `content_digest`, but a large file that did not change since another process read it is not read again."""
    try:
        status = os.stat(path)
        if status.st_size < _LARGE_BYTES or time.time() - status.st_ctime < _SETTLED_S:
            return content_digest(path)
        state = [status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns, os.path.abspath(path)]
        record = cache_folder() / "digests" / hashlib.sha256(json.dumps(state).encode()).hexdigest()
        if record.exists():
            return record.read_text(encoding="ascii")
        digest = content_digest(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, digest)
    except OSError:  # the cache is reported where its content is missed
        return content_digest(path)
    return digest


@functools.lru_cache(maxsize=1_000)
def _digest_of(path: str, *_unchanged: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def kept_in(folder: Path, what: str) -> Iterator[None]:
    """A block that keeps a content such as "The rows" below `cache_folder`; a `UserError` if the disk refuses it."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM | _CLOSED:
            raise
        raise UserError("cache-not-written", "INDICTUNE_CACHE", folder, what=what, reason=error.strerror) from error


def checkpoint_around(folder: str | Path) -> Path | None:
    """The checkpoint that a folder is, or would be in, links followed; None without one."""
    leads_to = Path(os.path.realpath(folder))
    for each in (leads_to, *leads_to.parents):
        if all(os.path.isfile(each / name) for name in _OF_A_CHECKPOINT):
            return each
    return None


def check_outside_checkpoints(folder: str | Path, flag: str) -> None:
    """Refuse to write to a folder that is a checkpoint or in one; it need not exist."""
    checkpoint = checkpoint_around(folder)
    if checkpoint is not None:
        raise UserError("folder-in-checkpoint", flag, folder, checkpoint=checkpoint)


AUTO = "auto"
NOTHING_TO_DO = "this run is finished; there is nothing to resume. `indictune evaluate` scores other rows."
RECIPE = "recipe.yaml"
METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"
BASELINE = "baseline.json"
BASELINE_TYPE = "character-ngrams"  # of the model in the folder `baseline` of a run
DISTILLED = "distil.json"  # how a student compares with its teacher
EXPORTED = "export.json"  # in a folder of `indictune export`: its format, and how it agrees with the model
HEALTH = "health.json"
SAMPLES = "samples.jsonl"  # answers that a language model wrote
TEST_FILE = ".test_file"  # JSON: the path of the evaluated file. `metrics.json`, which is pushed, has its name alone
REST = "\n# Not chosen: defaults, and what followed from the run.\n"
# A JSON list of files to push. It exists until a finished run is pushed.
NOT_PUSHED = ".not_pushed"


def is_finished(output_dir: Path) -> bool:
    """Whether a run ended here: its metrics are written last. A power cut may leave an empty file."""
    mark = output_dir / METRICS
    return mark.is_file() and mark.stat().st_size > 0


def json_or_nothing(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is either the old one or the new one, never a part; errors as of `LineFile`."""
    whole = content if isinstance(content, bytes) else _encoded(content)
    with LineFile(path, len(whole)) as file:
        file.append(whole)


class LineFile:
    """A file that is written text by text, and is either the old one or, at the end of the block, the new one.

    Args:
        whole_bytes: its size, if that is known; an error names it.

    Raises:
        OSError: it names the file. If the disk refused it, it also has the bytes that are needed and free.
    """

    def __init__(self, path: Path, whole_bytes: int = 0) -> None:
        self.path, self._whole = path, whole_bytes
        # No other's on a shared disk, where processes of several containers have one number; nor a link's of a folder.
        self._temporary = path.with_name(f".{path.name}.{token_hex(8)}")
        self._needed = 0

    def __enter__(self) -> LineFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._cleaning():
            self._file = self._temporary.open("xb")
        return self

    def append(self, text: str | bytes) -> None:
        """Add a text, or bytes as they are."""
        content = text if isinstance(text, bytes) else _encoded(text)
        self._needed += len(content)
        with self._cleaning():
            self._file.write(content)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # that error counts, not those of cleaning up
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            with suppress(OSError):
                self._file.close()
            return
        with self._cleaning():
            self._file.close()
            self._temporary.replace(self.path)

    @contextmanager
    def _cleaning(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _named(error, self.path, max(self._needed, self._whole)) from error
            raise


def _encoded(text: str) -> bytes:
    """Encode a text as UTF-8. Half a surrogate pair, from a file name or a row, becomes an escape, as in JSON."""
    return text.encode("utf-8", errors="backslashreplace")


def _named(error: OSError, path: Path, needed_bytes: int) -> OSError:
    """The error with the name of the file and the bytes: that of a full disk names none."""
    reason = str(error.strerror)
    if error.errno in NO_ROOM | REFUSED:
        reason += f". It needs {needed_bytes:,} bytes"
    if error.errno in NO_ROOM:
        reason += f", and {shutil.disk_usage(path.parent).free:,} are free"
    return OSError(error.errno, reason, str(path))


@dataclass
class Record:
    """A growing file of JSON lines. A line that the disk refuses is lost, and the run continues."""

    path: Path
    _warned: bool = False

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line. Warn the first time that the disk refuses one."""
        try:
            with self.path.open("ab") as file:
                file.write(_encoded(json_line(entry)))
        except OSError as error:
            if not self._warned:
                logger.warning("%s cannot be written: %s. The run continues.", self.path, error.strerror)
            self._warned = True


def json_line(entry: Mapping[str, Any]) -> str:
    """One line of a file of JSON lines."""
    return json.dumps(_as_json(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _as_json(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by texts that `float` and pandas read."""
    if isinstance(value, str | int):  # first: a check for Mapping is slow
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_whole(path, json.dumps(_as_json(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, content: Mapping[str, Any], chosen: Iterable[str] = ()) -> None:
    """Write YAML whole or not at all: the `chosen` keys in their order, and the others sorted, below a comment."""
    first = {name: content[name] for name in chosen if name in content}
    rest = {name: value for name, value in content.items() if name not in first}
    texts = [yaml.safe_dump(first, allow_unicode=True, sort_keys=False)] if first else []
    texts += [REST] if first and rest else []
    texts += [yaml.safe_dump(rest, allow_unicode=True, sort_keys=True)] if rest or not first else []
    write_whole(path, "".join(texts))


def keep_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drop lines of a file of JSON lines, such as those of repeated steps; returns those that are left.

    Lines that were cut off go too. The file need not exist.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # a killed run may have left an unfinished line
            entry = json.loads(line)
            if keeps(entry):
                kept.append((line, entry))
    write_whole(path, "".join(f"{line}\n" for line, _ in kept))
    return [entry for _, entry in kept]


def lock_file(
    path: Path, timeout_s: float = _SOON_S, mode: int = 0o644, is_of_process: bool = True
) -> AbstractContextManager[object]:
    """Take a lock, which the end of the block, or of this process, releases. A link is not followed.

    The kernel releases a lock when its process ends, however that is. Forked children do not keep it (filelock 4.2
    closes it in them): processes that read rows ahead outlive a killed run for some seconds, and must not block the
    next one. Without file locks, filelock falls back to a marker file. After a kill on another machine, all would wait
    for it; so the fallback is off.

    If it is of the process, that may take it again; else another thread of it waits too. A timeout of -1 is for ever.

    Raises:
        Timeout: another one has it.
        OSError: the file system has no locks, or the file cannot be written.
    """
    lock = FileLock(path, mode=mode, fallback_to_soft=False, is_singleton=is_of_process, thread_local=False)
    return lock.acquire(timeout=timeout_s, poll_interval=0.01)


def lock_if_possible(path: Path) -> AbstractContextManager[object]:
    """As `lock_file`, and nothing on a file system without locks."""
    try:
        return lock_file(path)
    except Timeout:
        raise
    except OSError as error:  # whoever writes next reports a disk that is full or read-only
        logger.debug("%s: %s", path, error)
        return nullcontext()


@contextmanager
def locked(folder: Path, what: str) -> Iterator[bool]:
    """Hold the lock of a folder, for a content such as "The rows"; the folder need not exist.

    If its file system has no locks, hold one of this machine: one process a node makes the content.

    Yields:
        Whether it is the lock of all machines.
    """
    name = hashlib.sha256(f"{os.getuid()} {folder}".encode()).hexdigest()[:24]
    of_all, of_node = folder.with_name(f".{folder.name}.lock"), Path(tempfile.gettempdir(), f"indictune-{name}.lock")
    with ExitStack() as held:
        is_of_all = False
        for path in (of_all, of_node):
            try:
                held.enter_context(_lock_patiently(path, what))
                is_of_all = path == of_all
                break
            except OSError as error:  # whoever writes next reports a disk that is full or read-only
                logger.info("%s: no lock in %s (%s)", what, path.parent, error)
        yield is_of_all


def _lock_patiently(path: Path, what: str) -> AbstractContextManager[object]:
    try:
        return lock_file(path, _SOON_S, 0o666, is_of_process=False)
    except Timeout:
        logger.info("%s: waiting for another process, which prepares this", what)
        with OWN_PROGRESS.waiting(f"waiting for another process, which prepares {what.lower()}"):
            return lock_file(path, -1, 0o666, is_of_process=False)


def fill_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill a folder of the cache if it is missing. One process does; others wait. May raise `cache-not-written`."""
    what = "The model"
    with kept_in(folder.parent, what):
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, what):
            if not folder.exists():
                _build_atomically(build, folder)


def _build_atomically(build: Callable[[Path], None], folder: Path) -> None:
    """Build in a temporary folder and rename it, so that a reader sees all or nothing. Without locks several may."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        unfinished = Path(temporary, "model")
        build(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has built the same bytes
                raise
