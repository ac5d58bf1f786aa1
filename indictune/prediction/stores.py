"""Folders and files on a disk or in a store of objects, written whole or not at all."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar

from indictune.credentials import without_tokens
from indictune.data.cache import write_through
from indictune.data.read.open_files import version_in
from indictune.errors import UserError

_URL = re.compile("[a-z][a-z0-9+.-]+://")
_WAITS_S = (1.0, 5.0, 20.0, 60.0, 120.0)  # before a store is asked again
# Words of errors after which asking again is of no use, in the texts of botocore, gcsfs and adlfs.
_REFUSED = re.compile("credential|token|denied|forbidden|unauthori|expired|AccessKey|Signature|NoSuchBucket", re.I)
_MISSING = re.compile("404|NoSuchKey|not found", re.I)
Result = TypeVar("Result")
Fill = Callable[[BinaryIO], object]


def is_url(path: str) -> bool:
    """Whether fsspec reads a path, such as `s3://bucket/tweets.parquet`."""
    return _URL.match(path) is not None


@dataclass(frozen=True)
class Store:
    """A folder, or the URL of one; `flag` named it. A missing file and a refusal are reported at once, others later.

    All methods raise `UserError` (`store-refused`) when the store stays unreachable for four minutes.
    """

    folder: str
    flag: str

    @cached_property
    def disk(self) -> Any:
        """The file system of fsspec."""
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.folder)[0]
        except ImportError as error:
            raise UserError("url-needs-package", self.flag, self.folder) from error

    def path(self, name: str) -> str:
        """Where a file of the folder is."""
        return f"{self.folder.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Whether the folder has a file, which then is whole."""
        if not is_url(self.folder):
            return os.path.exists(self.path(name))
        return bool(self._patiently(lambda: self._has(name)))

    def _has(self, name: str) -> bool:
        self.disk.invalidate_cache()
        try:
            self.disk.info(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def is_empty(self) -> bool:
        """Whether there is no folder, or nothing in it."""
        if not is_url(self.folder):
            return not os.path.isdir(self.folder) or not os.listdir(self.folder)
        return not self._patiently(lambda: self.disk.exists(self.folder) and self.disk.ls(self.folder, detail=False))

    def read(self, name: str) -> bytes | None:
        """The content of a file; None without it."""
        try:
            if not is_url(self.folder):
                return Path(self.path(name)).read_bytes()
            self.disk.invalidate_cache()
            return bytes(self._patiently(lambda: self.disk.cat_file(self.path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, fill: Fill) -> None:
        """Write a file, which is there when it is whole."""
        if not is_url(self.folder):
            os.makedirs(self.folder, exist_ok=True)
            with whole(Path(self.path(name)), Path(self.folder)) as file:
                fill(file)
            return
        with TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            with copy.open("wb") as file:
                fill(file)
            self._patiently(lambda: self.disk.put_file(str(copy), self.path(name)))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self.exists(name):
            self._patiently(lambda: self.disk.rm_file(self.path(name)))

    def files(self, pattern: str) -> dict[str, str]:
        """The URLs of the files for a pattern, in a folder or of one file, sorted, and what changes with each."""
        try:
            found = self._patiently(lambda: self._listed(pattern))
        except FileNotFoundError:
            raise UserError("no-such-file", self.flag, pattern) from None
        about = {self.disk.unstrip_protocol(file): info for file, info in sorted(found.items())}
        return {file: f"{info.get('size')} {version_in(info) or ''}" for file, info in about.items()}

    def _listed(self, pattern: str) -> dict[str, Any]:
        import fsspec

        self.disk.invalidate_cache()
        path = fsspec.core.url_to_fs(pattern)[1]
        if any(sign in path for sign in "*?["):
            found = self.disk.glob(path, detail=True)
        elif (about := self.disk.info(path))["type"] == "file":
            found = {path: about}
        else:
            found = self.disk.find(path, maxdepth=1, detail=True)
        return {file: info for file, info in found.items() if info["type"] == "file"}

    def _patiently(self, ask: Callable[[], Result]) -> Result:
        for wait_s in (*_WAITS_S, None):
            try:
                return ask()
            except Exception as given:  # of botocore, aiohttp and others
                # fsspec (2026.9) raises FileNotFoundError for servers that fail or refuse, too.
                error = given.__cause__ or given if isinstance(given, FileNotFoundError) else given
                if isinstance(error, FileNotFoundError) or (error is not given and _MISSING.search(str(error))):
                    raise
                reason = without_tokens(" ".join(str(error).split()) or type(error).__name__)
                if wait_s is None or _REFUSED.search(f"{type(error).__name__} {reason}"):
                    raise UserError("store-refused", self.flag, self.folder, reason=reason) from error
                print(f"warning: {self.folder}: {reason}. Asking again in {wait_s:g} s.", file=sys.stderr, flush=True)
                time.sleep(wait_s)
        raise AssertionError


def stored_file(path: str, flag: str = "--input_file") -> StoredFile:
    """A file in its folder, by its path or URL."""
    folder, slash, name = path.rpartition("/")
    return StoredFile(Store(folder or slash or ".", flag), name)


@dataclass(frozen=True)
class StoredFile:
    """A file in a folder."""

    store: Store
    name: str

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, to read bytes from any place."""
        path = self.store.path(self.name)
        if not is_url(path):
            with open(path, "rb") as file:
                yield file
            return
        with self.store._patiently(lambda: self.store.disk.open(path, "rb")) as file:
            yield file

    def fetch(self, copy: Path) -> None:
        """Copy the file."""
        self.store._patiently(lambda: self.store.disk.get_file(self.store.path(self.name), str(copy)))


@contextmanager
def whole(path: Path, folder: Path) -> Iterator[BinaryIO]:
    """A file that is written in a folder, and moved to its path when the disk has it."""
    unfinished = folder / f".{path.name}.{os.getpid()}"
    try:
        with unfinished.open("wb") as file:
            yield file
        write_through(unfinished)
        unfinished.replace(path)
        write_through(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
