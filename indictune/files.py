"""File names in a run's folder, and how its files are written: whole or not at all."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from indictune.cache_folders import NO_ROOM, REFUSED

logger = logging.getLogger(__name__)

AUTO = "auto"
NOTHING_TO_DO = "this run is finished; there is nothing to resume."
RECIPE = "recipe.yaml"
METRICS = "metrics.json"
# There while a finished run is to be pushed and is not. What to type instead stands in it.
NOT_PUSHED = ".not_pushed"


def is_finished(output_dir: Path) -> bool:
    """Whether a run has ended here: its metrics are written last. An empty file may be what a power cut left of it."""
    mark = output_dir / METRICS
    return mark.is_file() and mark.stat().st_size > 0


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, never a part.

    Raises:
        OSError: it names the file, what the file needs where the disk does not take it, and of a full one what is
            free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    content = _encoded(text)
    with _naming(path, content):
        temporary.unlink(missing_ok=True)  # what an unpacked folder brings under that name may be a link
        try:
            with temporary.open("xb") as file:
                file.write(content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _encoded(text: str) -> bytes:
    """A text as UTF-8. Half a surrogate pair, which a file's name or a row may hold, is written as an escape: JSON
    gives it back as it was."""
    return text.encode("utf-8", errors="backslashreplace")


@contextmanager
def _naming(path: Path, content: bytes) -> Iterator[None]:
    """A block that writes a file; the error of a full disk names none, and no error tells the bytes."""
    try:
        yield
    except OSError as error:
        told = str(error.strerror)
        if error.errno in NO_ROOM | REFUSED:
            told += f". It needs {len(content):,} bytes"
        if error.errno in NO_ROOM:
            told += f", and {shutil.disk_usage(path.parent).free:,} are free"
        raise OSError(error.errno, told, str(path)) from error


class Record:
    """A file of JSON lines that grows. What the disk does not take waits for the next line; no run ends by it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""
        self._warned = False

    def append(self, line: str) -> None:
        """Add a line, after those that wait; the first time that the disk does not take them, warn."""
        self._waiting += line
        size = None
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            content = _encoded(self._waiting)
            with _naming(self.path, content):
                _add(self.path, content)
        except OSError as error:
            with suppress(OSError):
                if size is not None:
                    os.truncate(self.path, size)  # a part of a line
            if not self._warned:
                logger.warning(
                    "%s cannot be written: %s. The run goes on; lines wait for room", self.path, error.strerror
                )
            self._warned = True
        else:
            self._waiting = ""

    def end(self) -> None:
        """Write what waits, at the end of a run, or tell that it is missing."""
        if self._waiting:
            self.append("")
        if self._waiting:
            logger.warning("%s lacks its last %d lines: there was no room", self.path, self._waiting.count("\n"))


def json_line(entry: Mapping[str, Any]) -> str:
    """A line of such a file."""
    return json.dumps(_as_json(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _as_json(value: Any) -> Any:
    """The same without NaN and infinity, which JSON has not; as texts, `float` and pandas read them."""
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that people can read, whole or not at all."""
    write_whole(path, json.dumps(_as_json(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write YAML whole or not at all."""
    write_whole(path, yaml.safe_dump(content, allow_unicode=True, sort_keys=True))


def keep_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drop lines of a file of JSON lines, such as those of steps that are done again, and lines that were cut off.

    Args:
        path: of the file, where there is one.
        keeps: tells which lines are kept.

    Returns:
        The lines that are left.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = [line for line in lines if _is_kept(line, keeps)]
    write_whole(path, "".join(f"{line}\n" for line in kept))
    return [json.loads(line) for line in kept]


def _is_kept(line: str, keeps: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a line is; not one that a killed run has left unfinished."""
    try:
        return keeps(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False
