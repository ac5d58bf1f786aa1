"""Find data files by name, pattern, folder or URL, open them, unpacked if need be, and decode their lines."""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import pyarrow as pa

from indictune.credentials import without_tokens
from indictune.data.cache import build_once
from indictune.data.languages import language_named
from indictune.errors import UserError
from indictune.files import PACKED, cache_folder, json_or_nothing, kept_in, kind_of_file, write_json

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
# A file may unpack to this, or to so many times its size: texts do not compress further, bombs do.
MAX_UNPACKED_BYTES = 1 << 30
MAX_RATIO = 100


def opened(path: str) -> BinaryIO:
    """A file, opened to read its bytes after unpacking. Text in UTF-16, as Excel's "Unicode Text", comes in UTF-8.

    Reading from it raises `UserError` if it is damaged, or larger than the limit.
    """
    packing = Path(path).suffix.lower()
    if packing not in PACKED:
        with open(path, "rb") as file, suppress(UnicodeDecodeError):  # of other bytes, which the reader names
            begin = file.read(4)  # that of UTF-32 begins with that of UTF-16
            if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and begin != codecs.BOM_UTF32_LE:
                file.seek(0)
                return io.BytesIO(file.read().decode("utf-16").encode())
        return open(path, "rb")
    unpacked = gzip.GzipFile(path) if packing == ".gz" else pa.CompressedInputStream(pa.OSFile(path), "zstd")
    return cast(BinaryIO, io.BufferedReader(_Limited(unpacked, path), _BUFFER_BYTES))


def unpacked_limit(path: str) -> int:
    """Bytes that a packed file may unpack to."""
    return max(MAX_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(path))


class _Limited(io.RawIOBase):
    """A stream that unpacks a file, up to the limit."""

    def __init__(self, unpacked: Any, path: str) -> None:
        self._unpacked, self._path = unpacked, path
        self._left = self._limit = unpacked_limit(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._unpacked.readinto(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError("unpacking-failed", value=self._path, reason=error) from error
        self._left -= count
        if self._left < 0:
            raise UserError("unpacked-too-large", value=self._path, limit=self._limit)
        return count

    def close(self) -> None:
        self._unpacked.close()
        super().close()


def decoded_lines(path: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, without a byte order mark, and the first byte that is not UTF-8, such as `0xff`, or "".

    U+DC80 to U+DCFF stand for the bytes that are not UTF-8.
    """
    with opened(path) as file:
        first = chain.from_iterable(map(lines_of_old_macs, islice(file, 1)))
        for number, line in enumerate(chain(first, file), 1):
            yield decoded(line, number)


def lines_of_old_macs(line: bytes) -> list[bytes]:
    """The lines of a file whose lines end in carriage returns, which is one line up to a line feed."""
    if b"\r" not in line or line.endswith(b"\n"):
        return [line]
    return [each + b"\n" for each in line.removesuffix(b"\r").split(b"\r")]


def decoded(line: bytes, number: int) -> tuple[str, str]:
    """The text of a line and its first byte that is not UTF-8, as in `decoded_lines`; `number` counts from 1."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode(), ""
    except UnicodeDecodeError as error:
        return line.decode(errors="surrogateescape"), f"0x{line[error.start]:02x}"


# `save_to_disk` of `datasets` writes them to the folder of a split, and to that of several splits.
_OF_SPLIT, _OF_SPLITS = "state.json", "dataset_dict.json"
_IN_FOLDERS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
_OF_A_SPLIT = re.compile(r"(?<![a-z])(train|valid|validation|val|dev|test|eval)(?![a-z])")
_URL = re.compile("(https?|hf|s3)://")
LANGUAGE = "{language}"  # in a path: the place of a language's code


def files_named(named: str | Sequence[str], split: str) -> tuple[str, dict[str, str | None]]:
    """A short name for the files, as messages have it, and each file once, with the language in its name or None.

    `named` are files, patterns such as `data/*.csv` and `data/{language}.csv`, folders of files of one kind, folders
    that `save_to_disk` wrote, of which `split` is taken, and URLs of all these, whose files are fetched.

    Raises `UserError` if no file has a pattern, a folder may hold several splits, or a URL cannot be fetched. Reading
    reports a missing file.
    """
    names = [named] if isinstance(named, str) else list(named)
    files = {file: language for name in names for file, language in _files(name, split).items()}
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more", files
    is_named = len(files) != 1 or Path(names[0]).is_dir() or _URL.match(names[0])
    return (names[0] if is_named else next(iter(files))), files


def saved_splits(folder: str) -> dict[str, tuple[str, ...]] | None:
    """Split -> files of a folder that `save_to_disk` wrote, `train` if it is one split; None for another folder."""
    if (Path(folder) / _OF_SPLIT).is_file():
        return {"train": _saved_files(Path(folder))}
    if (Path(folder) / _OF_SPLITS).is_file():
        names: list[str] = _json(Path(folder) / _OF_SPLITS)["splits"]
        return {name: _saved_files(Path(folder) / name) for name in names}
    return None


def _files(name: str, split: str) -> Mapping[str, str | None]:
    if _URL.match(name):
        copies = _fetched(name)
        matching = _matching(name, copies) if _is_pattern(name) else dict.fromkeys(copies)
        return {copies[file]: language for file, language in matching.items()}
    if Path(name).is_dir():
        in_folder = saved_splits(name)
        if in_folder is None:
            return dict.fromkeys(_of_one_kind(name, [str(file) for file in Path(name).iterdir()]))
        wanted = "train" if (Path(name) / _OF_SPLIT).is_file() else split
        if wanted not in in_folder:
            raise UserError("saved-split-missing", value=name, split=split, splits=", ".join(in_folder))
        return dict.fromkeys(in_folder[wanted])
    if Path(name).exists() or not _is_pattern(name):
        return {name: None}
    found = glob.glob(name.replace(LANGUAGE, "*"), recursive=True)
    return _matching(name, [file for file in found if Path(file).is_file()])


def _is_pattern(name: str) -> bool:
    """Whether a name means files that are listed; web servers list none."""
    return not name.startswith("http") and (glob.has_magic(name) or LANGUAGE in name)


def _matching(pattern: str, files: Iterable[str]) -> dict[str, str | None]:
    """The files that were found for a pattern, sorted, and the language of each; others than `{language}` means go."""
    found: dict[str, str | None] = dict.fromkeys(sorted(files))
    if LANGUAGE in pattern:
        end = re.split(r"/(?=[^/]*[*?{])", "/" + pattern, maxsplit=1)[-1]  # from the first folder with a sign
        signs = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]", LANGUAGE: "(?P<language>[a-z]{2,3})"}
        parts = re.split("(" + "|".join(map(re.escape, signs)) + ")", end)
        whole = re.compile("(?:.*/)?" + "".join(signs.get(part, re.escape(part)) for part in parts))
        codes = {file: match["language"] for file in found if (match := whole.fullmatch(file))}
        found = {file: language_named(code) or code for file, code in codes.items()}
    if not found:
        raise UserError("no-files-match", value=pattern)
    return found


def _of_one_kind(folder: str, files: Iterable[str]) -> list[str]:
    """The data files of a folder, sorted; a `UserError` if there are none, or they may not be read together."""
    found = sorted(file for file in files if kind_of_file(file) in _IN_FOLDERS and Path(file).name[0] not in "._")
    of_splits = [file for file in found if _OF_A_SPLIT.search(Path(file).stem.lower())]
    if len({kind_of_file(file) for file in found}) != 1 or (of_splits and found[1:]):
        raise UserError("folder-not-saved", value=folder)
    return found


@functools.cache
def _fetched(url: str) -> Mapping[str, str]:
    """The files that a URL means -> their copies. A process asks once, so that all its rows are of one state."""
    from huggingface_hub import constants, errors

    listing = cache_folder() / "downloads" / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.json"
    if url.startswith("hf://") and constants.is_offline_mode():
        versions = json_or_nothing(listing)
        if not versions:
            raise UserError("url-not-fetched", value=url)
        return {file: _copy(None, file, version) for file, version in versions.items()}
    try:
        disk, files = _found_by_url(url)
        versions = {file: _version(file, disk.info(file)) for file in files}
        copies = {file: _copy(disk, file, version) for file, version in versions.items()}
    except ImportError as error:
        raise UserError("url-needs-package", value=url) from error
    except UserError:
        raise
    except Exception as error:  # of aiohttp, botocore and huggingface_hub
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        if isinstance(cause, errors.GatedRepoError):
            repository = "/".join(url.partition("://")[2].partition("@")[0].split("/")[:3])
            raise UserError("dataset-gated", value=url, page=f"{constants.ENDPOINT}/{repository}") from error
        # fsspec (2026.9) raises FileNotFoundError for an unreachable server too.
        if isinstance(cause, FileNotFoundError) or str(cause).startswith("404"):
            raise UserError("no-such-file", value=url) from error
        reason = without_tokens(" ".join(str(cause).split()) or type(cause).__name__)
        raise UserError("url-unreadable", value=url, reason=reason) from error
    with kept_in(listing.parent, "The list of files"):
        write_json(listing, versions)
    return copies


def _found_by_url(url: str) -> tuple[Any, Sequence[str]]:
    """The file system of fsspec that has the files of a URL, and their names there."""
    import fsspec

    if url.startswith("http"):
        import aiohttp

        # By default a download has 5 minutes.
        patience = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        disk, path = fsspec.core.url_to_fs(url, client_kwargs={"timeout": patience})
        return disk, [path]
    disk, path = fsspec.core.url_to_fs(url.replace(LANGUAGE, "*"))
    if _is_pattern(url):
        return disk, [file for file in disk.glob(path) if disk.isfile(file)]
    return disk, [path] if disk.isfile(path) else _of_one_kind(url, disk.ls(path, detail=False))


def version_in(about: Mapping[str, Any]) -> str | None:
    """What fsspec knows of a file that changes with its content: its ETag, another hash, or its date; None if nothing.

    It is the first that a store gives: lists and single questions write dates differently.
    """
    names = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime")
    return next((str(about[name]) for name in names if about.get(name)), None)


def _version(url: str, about: Mapping[str, Any]) -> str:
    if (version := version_in(about)) is None:
        raise UserError("url-without-version", value=url)
    return version


def _copy(disk: Any, file: str, version: str) -> str:
    """The path of the copy of a file at a version, which is fetched if it is not there; whole or not at all."""
    name = Path(urlsplit(file).path).name

    def make(folder: Path) -> None:
        if disk is None:
            raise UserError("url-not-fetched", value=file)
        logger.info("Fetching %s", file)
        disk.get_file(file, str(folder / name))
        disk.invalidate_cache()
        about = disk.info(file)
        if _version(file, about) != version or about.get("size") not in (None, (folder / name).stat().st_size):
            raise UserError("url-changed", value=file)

    return str(build_once("download", [file, version], f"The copy of {file}", make) / name)


def _saved_files(folder: Path) -> tuple[str, ...]:
    return tuple(str(folder / each["filename"]) for each in _json(folder / _OF_SPLIT)["_data_files"])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("rows-unreadable", value=path, reason=error) from error
