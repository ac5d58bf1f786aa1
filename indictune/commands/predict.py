"""`indictune predict`: label texts from the command line, standard input or a file; a killed command resumes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow as pa
from filelock import Timeout
from tqdm import tqdm

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import TextFileArguments, flag
from indictune.console_text import shown_rate
from indictune.data.bad_rows import REJECTED, BadRows, bad_rows
from indictune.data.cache import stored_batches, write_through
from indictune.data.read.delimited import DELIMITERS
from indictune.distributed.launch import rank_of, read_launch, world_size_of
from indictune.errors import Problem, Problems, UserError, attributed_to, problem
from indictune.files import NO_ROOM, REFUSED, check_outside_checkpoints, lock_if_possible
from indictune.models.adapters import config_file
from indictune.prediction import labelled_rows
from indictune.prediction.labelled_rows import TextFile, label, text_batch
from indictune.prediction.served_classifier import Classifier, check_pairs, served_model
from indictune.prediction.written_rows import MOST_SHEET_ROWS, as_json_lines, writer_of
from indictune.run import OWN_PROGRESS
from indictune.stop_signals import EXIT_RESUMABLE, Stopped

_FLAG = "--output_file"
_JOB = "job.json"
_WINDOW = ".arrow"
_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 30.0
_RANK_0_WAIT_S = 5.0  # how long another rank waits for rank 0, which has the same problem, to report it
Labeller = Callable[[Classifier, pa.RecordBatch], pa.RecordBatch]
WAIT_FOR_RANK_0_S = 600.0  # it reads the same file and weights at the same time


@dataclass
class PredictFlags(TextFileArguments):
    """Which texts a finished classifier labels, and where the labels go. Other values default to its training's."""

    needed = ("model", 'indictune predict FOLDER --text "...", with the --output_dir of a finished run.')

    text: list[str] = flag([], "Texts to label. Default: standard input, one text a line, or two with a tab between.")
    text_pair: list[str] = flag([], "Second texts, one for each of --text, for a model of pairs.")
    output_file: str | None = flag(
        None,
        "Gets the labels: csv, tsv, jsonl, parquet or xlsx. Must not exist. Default: JSON lines on standard output.",
    )
    excel: bool = flag(False, "Begin a csv or tsv file with a byte order mark, so that Excel reads it as UTF-8.")

    def check(self) -> Iterator[Problem]:
        """Refuse texts from two places, and second texts without a first one each."""
        yield from super().check()
        if self.text and self.input_file is not None:
            yield problem("two-text-sources", "--text", other=f"--input_file {self.input_file}")
        if self.excel and Path(self.output_file or "").suffix.lower() not in DELIMITERS:
            yield problem("no-effect", "--excel", "true", other=f"--output_file {self.output_file or '(none)'}")
        if self.text_pair and len(self.text_pair) != len(self.text):
            yield problem("pairs-uneven", "--text_pair", len(self.text_pair), texts=len(self.text))


def run_predict(flags: Mapping[str, list[str]]) -> int:
    """Label texts with a finished run's classifier."""
    rank = rank_of(os.environ)
    try:
        _predict(read_arguments(flags, PredictFlags, "model"))
    except UserError:
        time.sleep(_RANK_0_WAIT_S if rank else 0)  # the launcher ends this rank meanwhile
        raise
    except Stopped:
        if rank == 0:
            print("indictune: stopped. The same command continues with the unlabelled rows.", file=sys.stderr)
        return EXIT_RESUMABLE
    return 0


def _predict(asked: PredictFlags) -> None:
    problems = Problems()
    launch = problems.attempt(read_launch, os.environ)
    if launch is not None and launch.world_size > 1 and (asked.input_file is None or asked.output_file is None):
        problems.append(problem("predict-of-many-processes", "--num_processes", launch.world_size))
    if asked.output_file is not None and rank_of(os.environ) == 0:  # a late rank may find the finished output
        problems.attempt(check_output, asked.output_file)
    served = served_model(asked, problems, may_tag=True)
    with TemporaryDirectory() as folder:
        source = None
        if served is not None and asked.input_file is not None:
            file = problems.attempt(labelled_rows.text_file, asked, served.reading)
            if file is not None:
                source = problems.attempt(InputFile.of, file, bad_rows(file.path, asked, Path(folder)))
        elif served is not None and asked.text:
            problems.attempt(check_pairs, served.reading, bool(asked.text_pair), "--text_pair")
        if source is not None and source.rows > MOST_SHEET_ROWS and str(asked.output_file).lower().endswith(".xlsx"):
            problems.append(problem("sheet-full", _FLAG, asked.output_file, rows=source.rows))
        problems.raise_any()
        assert served is not None
        classifier = Classifier(served, asked.max_tokens_per_device)
        if source is None:
            texts = list(zip(asked.text, asked.text_pair, strict=True)) if asked.text_pair else asked.text
            are_pairs = served.reading.text_pair_column is not None
            windows = iter([text_batch(texts)]) if asked.text else labelled_rows.standard_input(are_pairs)
            _answer(windows, classifier, asked.output_file, asked.excel)
        elif asked.output_file is None:
            _answer(source.windows(), classifier, None)
            if source.bad.count:
                print(f"warning: {source.bad.left_out()}", file=sys.stderr)
        else:
            label_file(source, classifier, Path(asked.output_file), for_excel=asked.excel)
            if rank_of(os.environ) == 0:
                _keep_rejected(source, Path(folder), Path(asked.output_file))


@dataclass(frozen=True)
class InputFile:
    """A file whose rows were read once: how many there are, and which cannot be read."""

    file: TextFile
    rows: int
    bad: BadRows

    @classmethod
    def of(cls, file: TextFile, bad: BadRows) -> InputFile:
        """Read a file to its end, so that it is refused before the weights are read."""
        with attributed_to(file.flag):
            rows = sum(batch.num_rows for batch in file.windows(bad))
            bad.finish(rows)
        for remark in bad.remarks if rank_of(os.environ) == 0 else ():
            print(f"{file.flag} {remark}", file=sys.stderr)
        return cls(file, rows, bad)

    def windows(self) -> Iterator[pa.RecordBatch]:
        """The readable rows."""
        return self.file.windows(BadRows(self.file.path, self.bad.skips_damage))


def _answer(
    windows: Iterator[pa.RecordBatch], classifier: Classifier, output: str | None, for_excel: bool = False
) -> None:
    labelled = (label(classifier, window) for window in windows)
    if output is not None:
        write_output(Path(output), labelled, for_excel)
        return
    for batch in labelled:
        sys.stdout.write(as_json_lines(batch))
        sys.stdout.flush()


def label_file(
    source: InputFile,
    classifier: Classifier,
    output: Path,
    make: Labeller = label,
    flag: str = _FLAG,
    for_excel: bool = False,
) -> None:
    """Label a file. Ranks take turns with its windows, and rank 0 writes the output when all are labelled.

    `make` turns a batch of texts into rows of the output, which `flag` names.
    """
    rank, world_size = rank_of(os.environ), world_size_of(os.environ)
    windows = LabelledWindows(output, _job(source, classifier), -(-source.rows // labelled_rows.WINDOW_ROWS), flag)
    if rank == 0:
        windows.open()
    elif not windows.wait_until_open():
        return
    with labelling_progress(source.rows, windows.done() * labelled_rows.WINDOW_ROWS, is_shown=rank == 0) as show:
        for number, batch in enumerate(source.windows()):
            if number % world_size == rank and not windows.path(number).exists():
                windows.put(number, make(classifier, batch))
                show(windows.done() * labelled_rows.WINDOW_ROWS)
        while rank == 0 and windows.done() < windows.count:
            time.sleep(_LOOK_EVERY_S)
            show(windows.done() * labelled_rows.WINDOW_ROWS)
    if rank == 0:
        windows.finish(for_excel)
        print(f"Written to {output}", file=sys.stderr)


def _job(source: InputFile, classifier: Classifier) -> dict[str, Any]:
    """All that the labels depend on: the file, the model, and how texts are read."""
    served = classifier.served
    folder = Path(served.args.model_name_or_path)
    used = [Path(source.file.path), config_file(folder), *sorted(folder.glob("*.safetensors"))]
    stated = [(os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in used]
    return {"files": stated, "rows": source.rows, "reading": asdict(served.reading), "columns": asdict(source.file)}


def _keep_rejected(source: InputFile, folder: Path, output: Path) -> None:
    rejected = folder / REJECTED
    if rejected.exists():
        kept = output.with_name(f"{output.name}.{REJECTED}")
        shutil.copyfile(rejected, kept)
        print(f"warning: {source.bad.left_out()}", file=sys.stderr)
        print(f"Rows that were left out, with reasons: {kept}", file=sys.stderr)


class LabelledWindows:
    """Labelled windows in a hidden folder next to the output, one file each. All ranks share the folder.

    `job` is all that the labels depend on; windows of another job are dropped.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], count: int, flag: str = _FLAG) -> None:
        self.output = output
        self.count = count
        self._flag = flag
        self.folder = output.with_name(f".{output.name}.unfinished")
        self._job = json.dumps(job, sort_keys=True)

    def open(self) -> None:
        """On rank 0: make the folder, or keep the windows of a killed command that was the same."""
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock_if_possible(self.folder / "lock")
            except Timeout:
                raise UserError("predict-in-progress", self._flag, self.output, folder=self.folder) from None
            if not self.is_open():
                for path in self.folder.glob(f"*{_WINDOW}"):
                    path.unlink()
                with _whole(self.folder / _JOB, self.folder) as file:
                    file.write(self._job.encode())

    def is_open(self) -> bool:
        """Whether the folder is that of this job."""
        try:
            return (self.folder / _JOB).read_text(encoding="utf-8") == self._job
        except (OSError, UnicodeDecodeError):
            return False

    def wait_until_open(self) -> bool:
        """On another rank: wait for rank 0. False if it has labelled all windows and written the output meanwhile."""
        since = time.monotonic()
        while not self.is_open():
            if self.output.exists():
                return False
            if time.monotonic() - since > WAIT_FOR_RANK_0_S:
                minutes = round(WAIT_FOR_RANK_0_S / 60)
                raise UserError("predict-without-rank-0", self._flag, self.output, folder=self.folder, minutes=minutes)
            time.sleep(_LOOK_EVERY_S)
        return True

    def done(self) -> int:
        """How many windows are labelled."""
        return sum(name.endswith(_WINDOW) for name in os.listdir(self.folder))

    def put(self, number: int, batch: pa.RecordBatch) -> None:
        """Keep a labelled window, whole or not at all."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        with self.writing(), _whole(self.path(number), self.folder) as file:
            file.write(sink.getvalue())

    def finish(self, for_excel: bool = False) -> None:
        """Write the output, whole or not at all, and remove the folder."""
        batches = (batch for number in range(self.count) for batch in stored_batches(self.path(number)))
        with self.writing(), _whole(self.output, self.folder) as file:
            writer_of(str(self.output), for_excel)(file, batches)
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, number: int) -> Path:
        """The file of a window, which exists if the window is labelled."""
        return self.folder / f"{number:08d}{_WINDOW}"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes. If the disk refuses (`output-not-written`), only whole windows are left."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM | REFUSED:
                raise
            kept = self.done() if self.folder.is_dir() else 0
            if not kept:
                shutil.rmtree(self.folder, ignore_errors=True)
            way_out = f"Make room, and repeat the command: it keeps {kept} of {self.count} parts." if kept else None
            raise UserError("output-not-written", self._flag, self.output, way_out, reason=error.strerror) from error


def check_output(path: str) -> None:
    """Refuse an output that exists, of an unknown kind, or in no folder."""
    writer_of(path)
    output = Path(path)
    check_outside_checkpoints(output, _FLAG)
    if os.path.lexists(output):
        raise UserError("output-exists", _FLAG, output)
    if not output.parent.is_dir():
        raise UserError("no-output-folder", _FLAG, output, folder=output.parent)


def write_output(output: Path, batches: Iterable[pa.RecordBatch], for_excel: bool = False) -> None:
    """Write labelled rows, whole or not at all; `output-not-written` if the disk refuses."""
    try:
        with _whole(output, output.parent) as file:
            writer_of(str(output), for_excel)(file, batches)
    except OSError as error:
        if error.errno not in NO_ROOM | REFUSED:
            raise
        raise UserError("output-not-written", _FLAG, output, reason=error.strerror) from error


@contextmanager
def _whole(path: Path, folder: Path) -> Iterator[BinaryIO]:
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


@contextmanager
def labelling_progress(rows: int, done: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
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
        OWN_PROGRESS.moved()
        bar.update(min(done, rows) - labelled)
        labelled = min(done, rows)
        if not on_terminal and time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            left_s = (rows - labelled) / max(rate(), 1e-9)
            tell(f"{labelled:,} of {rows:,} rows, {shown_rate(rate())} rows/s, {duration(left_s)} left")

    with tqdm(total=rows, initial=first, unit=" rows", disable=not on_terminal, dynamic_ncols=True) as bar:
        if first:
            tell(f"resuming: {first:,} of {rows:,} rows are labelled")
        yield show
    tell(f"{labelled - first:,} rows in {duration(time.monotonic() - began)} ({shown_rate(rate())} rows/s)")


def duration(seconds: float) -> str:
    """Seconds as `5 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
