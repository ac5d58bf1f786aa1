"""Checkpoints that are whole or not there: what is in one, whether it is as it was written, and which is the newest.

A checkpoint is the folder `checkpoint-<step>`. It is written under a hidden name, and gets its own by one rename after
all of its files and `manifest.json` have reached the disk. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from indictune import cache_folders
from indictune.data.cache import write_through

MANIFEST = cache_folders.MANIFEST
PREFIX = "checkpoint-"
UNFINISHED = ".unfinished-checkpoint"  # its sibling while it is written
UNFINISHED_MODEL = ".unfinished-model"
_REPLACED = ".replaced-checkpoint"
_HASHED_AT_ONCE = 4
EVERY_FILE = slice(None)


Each = TypeVar("Each")


@dataclass(frozen=True)
class FileDigest:
    """A file as it was written.

    Attributes:
        bytes: its size.
        sha256: of its content, in hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps that are done.
        rows_of_epoch: rows of the running epoch that have been trained on, over all processes.
        strategy: that wrote it, in the names of `accelerate_configs/`.
        world_size: processes that wrote it.
        global_batch_size: rows of a step.
        save: a name of its own; the disks of several nodes have the same.
        data: digest of the training rows and of the order that they are dealt in.
        recipe: digest of the whole configuration, `recipe.yaml`.
        versions: of the packages that wrote it, by name.
        evaluation_due: whether the run was stopped before it had evaluated this step.
        files: by path inside the folder, with `/` between its parts.
        validation: digest of the rows that checkpoints were compared on last; None where there were none, or the
            version that wrote it did not tell.
        planned: False where the run in whose folder it is saved it only because it was asked to stop (`plan`), which
            earlier versions did not tell.
    """

    step: int
    rows_of_epoch: int
    strategy: str
    world_size: int
    global_batch_size: int
    save: str
    data: str
    recipe: str
    versions: Mapping[str, str]
    evaluation_due: bool
    files: Mapping[str, FileDigest]
    validation: str | None = None
    planned: bool = True

    def to_json(self) -> str:
        """The text of `manifest.json`, which ends with a digest of the rest."""
        content = asdict(self)
        if self.validation is None:
            del content["validation"]
        if self.planned:
            del content["planned"]
        return json.dumps({**content, "sha256": _digest_of(content)}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """What `to_json` wrote.

        Raises:
            ValueError: it is not that, to the letter; a TypeError, KeyError or AttributeError tells the same.
        """
        content = json.loads(text)
        content.pop("sha256")
        files = {name: FileDigest(**entry) for name, entry in content.pop("files").items()}
        found = cls(**content, files=files)
        numbers = (found.step, found.rows_of_epoch, found.world_size, found.global_batch_size)
        if found.to_json() != text or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("it is not as it was written")
        return found

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(entry.bytes for entry in self.files.values())


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def path_of(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step stands, or will."""
    return output_dir / f"{PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """The step in a folder's name; -1 where it is no checkpoint's."""
    step = checkpoint.name.removeprefix(PREFIX)
    return int(step) if checkpoint.name.startswith(PREFIX) and step.isascii() and step.isdigit() else -1


def listed(output_dir: Path) -> list[Path]:
    """The folders with a checkpoint's name, the newest first, whole or not."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def files_in(folder: Path) -> list[str]:
    """Paths of all files below a folder, but for the manifest, in order.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for parent, _, names in os.walk(folder, onerror=_raise):
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(set(found) - {MANIFEST})


def _raise(error: OSError) -> None:
    raise error


def digest(path: Path) -> FileDigest:
    """Of a file's content, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def settle(folder: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Let files reach the disk, closed to other users' writing; returns their digests."""
    paths = {name: folder / name for name in names}
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = pool.map(digest, paths.values())  # computed from memory while the disk writes
        for path in paths.values():
            _close(path)
            write_through(path)
        return dict(zip(paths, digests, strict=True))


def _close(path: Path) -> None:
    """Let no other user write to a file or folder, where the file system can; what goes on from it looks again."""
    mode = path.stat().st_mode
    if mode & 0o022:
        with suppress(OSError):
            path.chmod(mode & ~0o022)


def seal(unfinished: Path, manifest: Manifest) -> None:
    """Let all of a checkpoint reach the disk whose files are settled, but for its name.

    Raises:
        OSError: the disk does not take it.
    """
    (unfinished / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    settle(unfinished, [MANIFEST])
    for parent, _, _ in os.walk(unfinished, topdown=False):
        _close(Path(parent))
        write_through(Path(parent))


def give_name(unfinished: Path, final: Path) -> None:
    """Give a sealed checkpoint its name, which takes no room. An older one of that name is replaced.

    Raises:
        OSError: the disk does not take it; then no `final` is there, or the one that was. Where only its name may not
            have reached the disk, it is there, whole.
    """
    replaced = final.with_name(_REPLACED)
    _delete(replaced)
    if final.exists() or final.is_symlink():
        final.rename(replaced)
    unfinished.rename(final)
    write_through(final.parent)
    _delete(replaced)


def _delete(path: Path) -> None:
    """A folder with what is in it, as far as the disk lets it go; of a link never what it points to."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed run was writing, and give a checkpoint back that it was about to replace."""
    replaced = output_dir / _REPLACED
    step = step_of_replaced(output_dir)
    if step is not None:
        replaced.rename(path_of(output_dir, step))
    for leftover in (replaced, output_dir / UNFINISHED_MODEL, *output_dir.glob(f"{UNFINISHED}*")):
        _delete(leftover)


def step_of_replaced(output_dir: Path) -> int | None:
    """Of the checkpoint that a killed run was about to replace, which `remove_leftovers` gives back."""
    manifest = read_manifest(output_dir / _REPLACED)
    return None if manifest is None or path_of(output_dir, manifest.step).exists() else manifest.step


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Of a folder; None where there is none, or not as it was written."""
    try:
        return Manifest.from_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def best_step(checkpoint: Path) -> int | None:
    """The step of the best checkpoint that one names; None where there is none yet, or the file cannot be read.

    It is in the name of a folder, which may have been moved. The state's `best_global_step` may be a step that was
    evaluated and not saved.
    """
    named = _best_named(checkpoint)
    return None if named is None else named[0]


def is_best_of(candidate: Path, checkpoint: Path) -> bool:
    """Whether a folder has the step and the score of the best checkpoint that another one names."""
    named = _best_named(checkpoint)
    return named is not None and step_of(candidate) == named[0] and _best_named(candidate) == named


def _best_named(checkpoint: Path) -> tuple[int, Any] | None:
    """Step and score of the best checkpoint."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        step = step_of(Path(state["best_model_checkpoint"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return (step, state.get("best_metric")) if step > 0 else None


def damage(
    checkpoint: Path, thorough: bool = True, share: slice = EVERY_FILE, read: Collection[str] = ()
) -> list[str]:
    """What is wrong with a checkpoint: a sentence for each bad file. Empty where it is whole.

    Args:
        checkpoint: the folder.
        thorough: whether to read files; else only their sizes are compared.
        share: which of the files, in order, are looked at; others may look at the rest.
        read: names of files that are read all the same.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return [f"{checkpoint / MANIFEST} {_why_not_read(checkpoint / MANIFEST)}"]
    problems = []
    if step_of(checkpoint) != manifest.step:
        problems.append(f"{checkpoint} holds step {manifest.step}")
    try:
        present = files_in(checkpoint)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
    problems += [f"{checkpoint / name} is missing" for name in sorted(set(manifest.files) - set(present))]
    names = present[share]
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        found = pool.map(
            lambda name: _damage_of_file(checkpoint / name, manifest.files.get(name), thorough or name in read), names
        )
        return problems + [
            f"{checkpoint / name} {problem}" for name, problem in zip(names, found, strict=True) if problem
        ]


def _why_not_read(manifest: Path) -> str:
    try:
        manifest.read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "is not as it was written"


def _damage_of_file(path: Path, expected: FileDigest | None, thorough: bool) -> str | None:
    if path.is_symlink():
        return "is a link"
    if expected is None:
        return f"is not in {MANIFEST}"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size:,} bytes instead of {expected.bytes:,}"
        return "is not as it was written" if thorough and digest(path) != expected else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def first_choice(whole: Iterable[Each], has_best: Callable[[Each], bool]) -> Each | None:
    """The one of whole checkpoints that `auto` goes on from: the first whose best can be gone on with too.

    Args:
        whole: the newest first; none is looked at after the choice.
        has_best: whether one can; the run would end with its best. The first is taken all the same where none can.
    """
    spare = None
    for each in whole:
        if has_best(each):
            return each
        spare = spare or each
    return spare


def rotate(output_dir: Path, limit: int | None, kept: Collection[Path]) -> None:
    """Delete the oldest checkpoints beyond `limit`, and none of those that are to be kept."""
    if limit is None:
        return
    found = listed(output_dir)
    free = [path for path in found if path not in kept]  # the newest first
    for path in free[max(limit - len(set(kept) & set(found)), 0) :]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, or a link to one: first its name, so that no part of one is ever seen."""
    gone = checkpoint.with_name(f"{UNFINISHED}-{checkpoint.name}")
    checkpoint.rename(gone)
    _delete(gone)
