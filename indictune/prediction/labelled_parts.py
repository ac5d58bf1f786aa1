"""Label the parts of input files, by several processes, and keep them so that a killed command goes on."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import Timeout
from tqdm import tqdm

from indictune.config.shared_arguments import BadRowArguments
from indictune.console_text import shown_rate
from indictune.data.bad_rows import REJECTED, BadRows, bad_rows
from indictune.data.cache import stored_batches
from indictune.distributed.launch import rank_of, world_size_of
from indictune.errors import Problems, UserError, attributed_to, problem
from indictune.files import NO_ROOM, REFUSED, lock_if_possible
from indictune.prediction.input_parts import InputFiles, InputPart, Windows, read_parts
from indictune.prediction.stores import Store, is_url, stored_file, whole
from indictune.prediction.written_rows import writer_of
from indictune.run import OWN_PROGRESS

FLAG = "--output_file"
# Readers of a folder of parquet files leave out those whose names begin so.
MANIFEST = "_manifest.json"
_WINDOW = ".arrow"
_NOT_OF_ROWS = ("store-refused", "input-changed")  # reasons for which no part is left out
_MOST_ASKED = 100  # parts of others at a time: they come in order
_LOOK_EVERY_S = 0.2
_LOOK_IN_STORE_S = 5.0
_TELL_EVERY_S = 30.0
WAIT_FOR_RANK_0_S = 600.0  # it reads the same file and weights at the same time
Make = Callable[[pa.RecordBatch], pa.RecordBatch]


def _failed(part: InputPart) -> str:
    """The file of the reasons why a part cannot be read."""
    return f"_{part.name}.failed.json"


def _rejected(part: InputPart) -> str:
    return f"_{part.name}.{REJECTED}"


def is_folder(output: str) -> bool:
    """Whether an output is a folder of parts, by its name or because it is there."""
    return is_url(output) or output.endswith("/") or os.path.isdir(output)


class LabelledParts:
    """Labelled parts, a file each: in an output folder, or in a hidden folder next to an output file.

    Processes share the folder. `job` is all that the labels depend on: hidden parts of another job are dropped, and
    an output folder of another job is refused. A process looks for the parts that the manifest names, and lists no
    folder.
    """

    def __init__(self, output: str, job: Mapping[str, Any], flag: str = FLAG) -> None:
        self.output, self.flag, self.parts = output, flag, list[InputPart]()
        self.done, self.failed = set[int](), list[InputPart]()  # as far as this process knows
        self.is_folder = is_folder(output)
        hidden = Path(output).with_name(f".{Path(output).name}.unfinished")
        self.store = Store(output.rstrip("/") if self.is_folder else str(hidden), flag)
        self._extension = ".parquet" if self.is_folder else _WINDOW
        self._job = json.loads(json.dumps(job))
        self.look_s = _LOOK_IN_STORE_S if is_url(self.store.folder) else _LOOK_EVERY_S

    def open(self, parts: Callable[[], Sequence[InputPart]]) -> None:
        """In the first process: write the manifest, or go on with the parts of a killed command that was the same."""
        with self.writing():
            known = self._manifest()
            if known is not None:
                self._try_failed_again(known)
            if self.is_folder:
                if known is None and not self.store.is_empty():
                    raise UserError("output-folder-not-empty", self.flag, self.output)
            else:
                Path(self.store.folder).mkdir(parents=True, exist_ok=True)
                try:
                    self._lock = lock_if_possible(Path(self.store.folder, "lock"))
                except Timeout:
                    folder = self.store.folder
                    raise UserError("predict-in-progress", self.flag, self.output, folder=folder) from None
            is_other = known is not None and known["job"] != self._job
            for path in Path(self.store.folder).glob("*.*") if is_other and not self.is_folder else ():
                path.unlink()
            if known is None or is_other or not known["parts"]:
                self.note()  # claims the folder, before files are looked at
                try:
                    self.parts = list(parts())
                except UserError:
                    self.store.remove(MANIFEST)
                    raise
                self.note()
        self.wait_until_open()

    def _try_failed_again(self, known: dict[str, Any]) -> None:
        """Forget that parts could not be read. A file that is one part may have been mended."""
        parts, job = list(map(InputPart.of_json, known["parts"])), known["job"]
        for number, part in enumerate(parts) if job.get("skips_damage") else ():
            if part.number not in known["done"] and self.store.exists(_failed(part)):
                self.store.remove(_failed(part))
                if part.place is None and part.file in self._job["files"]:
                    job["files"][part.file] = self._job["files"][part.file]
                    parts[number] = replace(part, version=job["files"][part.file])
        if job == self._job and parts:
            self.parts, self.done = parts, set(known["done"])
            known["parts"] = [asdict(part) for part in parts]
            self.note(known)

    def _manifest(self) -> Any:
        try:
            found = json.loads(self.store.read(MANIFEST) or b"null")
            return found if found and {"job", "parts"} <= found.keys() else None
        except (ValueError, AttributeError):
            return None

    def note(self, known: Any = None, **more: object) -> None:
        """Write what is known to the manifest, unless another command has taken the output folder."""
        known = known or (self._manifest() if self.is_folder else None)
        if known is not None and known["parts"] and known["job"] != self._job:
            raise UserError("output-of-another-run", self.flag, self.output, manifest=MANIFEST)
        parts = [asdict(part) for part in self.parts]
        known = {"job": self._job, "parts": parts, "done": sorted(self.done), **more}
        self.store.write(MANIFEST, lambda file: file.write(json.dumps(known).encode()))

    def wait_until_open(self) -> bool:
        """Wait for the manifest. False if the first process has written the output file meanwhile."""
        since = time.monotonic()
        while (known := self._manifest()) is None or known["job"] != self._job or not known["parts"]:
            if not self.is_folder and os.path.exists(self.output):
                return False
            if time.monotonic() - since > WAIT_FOR_RANK_0_S:
                details: dict[str, Any] = {"folder": self.store.folder, "minutes": round(WAIT_FOR_RANK_0_S / 60)}
                raise UserError("predict-without-rank-0", self.flag, self.output, **details)
            time.sleep(self.look_s)
        self.parts = [InputPart.of_json(each) for each in known["parts"]]
        self.done = set(known.get("done", ()))
        return True

    def is_done(self, part: InputPart) -> bool:
        """Whether a part is labelled."""
        if part.number not in self.done and self.store.exists(f"{part.name}{self._extension}"):
            self.done.add(part.number)
        return part.number in self.done

    def is_settled(self, part: InputPart) -> bool:
        """Whether a part is labelled, or was found to be unreadable."""
        if not self.is_done(part) and part not in self.failed and self.store.exists(_failed(part)):
            self.failed.append(part)
        return part.number in self.done or part in self.failed

    def fail(self, part: InputPart, error: UserError) -> None:
        """Keep the reasons why a part cannot be read; the next command tries it again."""
        reasons = "; ".join(map(str, error.problems))
        content = json.dumps({"file": part.file, "reason": reasons}, ensure_ascii=False)
        self.store.write(_failed(part), lambda file: file.write(content.encode()))
        self.failed.append(part)

    def put(self, part: InputPart, batches: Windows) -> None:
        """Keep a labelled part, whole or not at all; `batches` are made while it is written."""
        write = writer_of("labels.parquet") if self.is_folder else _write_arrow
        with self.writing():
            self.store.write(f"{part.name}{self._extension}", lambda file: write(file, batches))
        self.done.add(part.number)

    def keep_rejected(self, part: InputPart, folder: Path) -> None:
        """Keep the rows of a part that were left out, if the folder has some."""
        if (rejected := folder / REJECTED).exists():
            content = rejected.read_bytes()
            rejected.unlink()
            with self.writing():
                self.store.write(_rejected(part), lambda file: file.write(content))

    def finish(self, for_excel: bool = False) -> None:
        """When all parts are labelled, write the output file and remove the folder, or write the whole manifest.

        Raises:
            UserError: parts could not be read. All others are labelled.
        """
        problems = Problems()
        for part in self.failed:
            reason = json.loads(self.store.read(_failed(part)) or b"{}").get("reason", "no reason is known")
            problems.append(problem("part-unreadable", "--input_file", part.file, reason=reason))
        left = [part for part in self.parts if part not in self.failed]
        if self.is_folder:
            self.note(rows=sum(map(self._rows_of, left)), failed=[part.name for part in self.failed])
        elif left:
            names = (self.store.path(f"{part.name}{self._extension}") for part in left)
            batches = (batch for name in names for batch in stored_batches(Path(name)))
            with self.writing(), whole(Path(self.output), Path(self.store.folder)) as file:
                writer_of(self.output, for_excel)(file, batches)
            rejected = (self.store.read(_rejected(part)) or b"" for part in self.parts)
            if content := b"".join(rejected):
                Path(f"{self.output}.{REJECTED}").write_bytes(content)
            shutil.rmtree(self.store.folder, ignore_errors=True)
        problems.raise_any()

    def _rows_of(self, part: InputPart) -> int:
        if part.crc is not None and part.rows is not None:
            return part.rows[1] - part.rows[0]
        with stored_file(self.store.path(f"{part.name}{self._extension}"), self.flag).opened() as file:
            return int(pq.read_metadata(file).num_rows)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes. If the disk refuses (`output-not-written`), only whole parts are left."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM | REFUSED:
                raise
            kept, of = sum(map(self.is_done, self.parts)), len(self.parts)
            if not kept and not self.is_folder:
                shutil.rmtree(self.store.folder, ignore_errors=True)
            way_out = f"Make room, and repeat the command: it keeps {kept} of {of} parts." if kept else None
            raise UserError("output-not-written", self.flag, self.output, way_out, reason=error.strerror) from error


def _write_arrow(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    for batch in batches:
        writer = writer or pa.ipc.new_file(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def label_input(
    source: InputFiles,
    labelled: LabelledParts,
    make: Make,
    asked: BadRowArguments | None = None,
    for_excel: bool = False,
) -> None:
    """Label all parts. Processes share them, and the first one finishes the output when all are labelled.

    `make` turns a window of texts into rows of the output. `asked` says what happens to bad rows of parts that were
    not read before.
    """
    rank, world_size = rank_of(os.environ), world_size_of(os.environ)
    if rank == 0:
        labelled.open(lambda: source.parts)
    elif not labelled.wait_until_open():
        return
    mine = [part for part in labelled.parts if part.number % world_size == rank]
    with counted_progress(labelled, rank) as look:
        for _ in labelled_one_by_one(mine, source, labelled, make, asked):
            look()
        while rank == 0 and look(waits=True):
            time.sleep(labelled.look_s)
    if rank == 0:
        labelled.finish(for_excel)
        print(f"Written to {labelled.output}", file=sys.stderr)


def labelled_one_by_one(
    parts: Sequence[InputPart], source: InputFiles, labelled: LabelledParts, make: Make, asked: BadRowArguments | None
) -> Iterator[InputPart]:
    """Label and keep parts that are not labelled. Yields each when it is kept."""
    with TemporaryDirectory() as folder:
        collectors = dict[int, BadRows]()

        def bad_of(part: InputPart) -> BadRows:
            if part.crc is not None or asked is None:  # its rows were checked before
                return BadRows(part.file, source.bad.skips_damage)
            name = part.file if part.rows is None else f"{part.file}, rows from {part.rows[0]}"
            collectors[part.number] = bad_rows(name, asked, Path(folder))
            return collectors[part.number]

        def rows_of(part: InputPart, windows: Windows) -> Windows:
            for window in windows:
                yield make(window)
                OWN_PROGRESS.moved()
            if part.number in collectors and (bad := collectors.pop(part.number)).count:
                print(f"warning: {bad.left_out()}", file=sys.stderr)
                labelled.keep_rejected(part, Path(folder))

        for part, windows in read_parts((part for part in parts if not labelled.is_done(part)), source.file, bad_of):
            try:
                with attributed_to(source.file.flag):
                    labelled.put(part, rows_of(part, windows))
            except UserError as error:
                is_of_input = {each.flag for each in error.problems} == {source.file.flag}
                if not is_of_input or error.code in _NOT_OF_ROWS or asked is None or asked.bad_rows == "stop":
                    raise
                labelled.fail(part, error)
            yield part


@contextmanager
def counted_progress(labelled: LabelledParts, rank: int) -> Iterator[Callable[..., int]]:
    """Show how many rows of an output are labelled, or how many parts if nobody has counted the rows.

    Yields:
        What looks, and returns how many parts are neither labelled nor unreadable. In a store of objects, it only
        looks for parts of other processes if it `waits` for them.
    """
    sizes = [part.rows[1] - part.rows[0] if part.rows else 0 for part in labelled.parts]
    unit, sizes = ("rows", sizes) if all(sizes) else ("parts", [1] * len(sizes))
    pending = [part for part in labelled.parts if part.number not in labelled.done]
    asked = noted = time.monotonic()

    def done() -> int:
        return sum(sizes) - sum(sizes[part.number] for part in pending)

    def settle() -> None:
        nonlocal pending
        pending = [part for part in pending if part.number not in labelled.done and part not in labelled.failed]
        show(done())

    def look(waits: bool = False) -> int:
        nonlocal asked, noted
        now = time.monotonic()
        if waits or now - asked > labelled.look_s:  # with many parts, not after each of them
            left = (part for part in pending if not labelled.is_settled(part))
            if rank == 0 and (waits or not is_url(labelled.store.folder)):
                any(False for _ in islice(left, _MOST_ASKED))
            settle()
            asked = time.monotonic()
        if rank == 0 and labelled.is_folder and now - noted > _TELL_EVERY_S:
            labelled.note()
            noted = now
        return len(pending)

    if rank == 0 and not is_url(labelled.store.folder):
        pending = [part for part in pending if not labelled.is_done(part)]
    with labelling_progress(sum(sizes), done(), is_shown=rank == 0, unit=unit) as show:
        yield look
        settle()


@contextmanager
def labelling_progress(rows: int, done: int, is_shown: bool, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Show on standard error how many rows are labelled; `done` rows are those of an earlier, killed command.

    Yields:
        What takes a new number of labelled rows.
    """
    first = labelled = min(done, rows)
    began = told = time.monotonic()
    on_terminal = is_shown and sys.stderr.isatty()

    def tell(text: str) -> None:
        if is_shown:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def rate() -> float:
        return (labelled - first) / (time.monotonic() - began)

    def show(done: int) -> None:
        nonlocal labelled, told
        bar.update(min(done, rows) - labelled)
        labelled = min(done, rows)
        if not on_terminal and time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            left_s = (rows - labelled) / max(rate(), 1e-9)
            tell(f"{labelled:,} of {rows:,} {unit}, {shown_rate(rate())} {unit}/s, {duration(left_s)} left")

    with tqdm(total=rows, initial=first, unit=f" {unit}", disable=not on_terminal, dynamic_ncols=True) as bar:
        if first:
            tell(f"resuming: {first:,} of {rows:,} {unit} are labelled")
        yield show
    tell(f"{labelled - first:,} {unit} in {duration(time.monotonic() - began)} ({shown_rate(rate())} {unit}/s)")


def duration(seconds: float) -> str:
    """Seconds as `5 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
