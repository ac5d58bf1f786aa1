"""`indictune predict`: label texts from the command line, standard input or a file."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from transformers.utils.logging import disable_progress_bar

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import TextFileArguments, flag
from indictune.data.bad_rows import REJECTED, BadRows, bad_rows
from indictune.distributed.launch import rank_of, read_launch, world_size_of
from indictune.errors import Problem, Problems, UserError, attributed_to, problem
from indictune.models.adapters import config_file
from indictune.prediction.labelled_rows import (
    WINDOW_ROWS,
    TextFile,
    as_json_lines,
    label,
    standard_input,
    text_batch,
    text_file,
)
from indictune.prediction.labelled_windows import (
    LOOK_EVERY_S,
    LabelledWindows,
    LabellingProgress,
    check_output,
    write_output,
)
from indictune.prediction.served_classifier import Classifier, served_model
from indictune.run import EXIT_RESUMABLE, Stopped

_RANK_0_WAIT_S = 5.0  # how long another rank waits for rank 0, which has the same problem, to report it


@dataclass
class PredictFlags(TextFileArguments):
    """Which texts a finished classifier labels, and where the labels go. Other values default to its training's."""

    needed = ("model", 'indictune predict FOLDER --text "...", with the --output_dir of a finished run.')

    text: list[str] = flag([], "Texts to label. Default: standard input, one text a line.")
    output_file: str | None = flag(
        None, "Gets the labels: csv, tsv, jsonl or parquet. Must not exist. Default: JSON lines on standard output."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse texts from two places."""
        yield from super().check()
        if self.text and self.input_file is not None:
            yield problem("two-text-sources", "--text", other=f"--input_file {self.input_file}")


def run_predict(flags: Mapping[str, list[str]]) -> int:
    """Label texts with a finished run's classifier; returns the exit code.

    Raises:
        UserError: with every problem of the flags, the model and the file.
    """
    rank = rank_of(os.environ)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    try:
        _predict(read_arguments(flags, PredictFlags, "model"))
    except UserError:
        time.sleep(_RANK_0_WAIT_S if rank else 0)  # the launcher ends this rank meanwhile
        raise
    except Stopped:
        if rank == 0:
            print("indictune: stopped. The same command goes on with what is not labelled yet.", file=sys.stderr)
        return EXIT_RESUMABLE
    return 0


def _predict(asked: PredictFlags) -> None:
    problems = Problems()
    problems.attempt(_check_launch, asked)
    if asked.output_file is not None and rank_of(os.environ) == 0:  # a late rank may find the finished output
        problems.attempt(check_output, asked.output_file)
    served = served_model(asked, problems)
    with TemporaryDirectory() as folder:
        source = None
        if served is not None and asked.input_file is not None:
            file = text_file(asked, served.reading)
            source = problems.attempt(InputFile.of, file, bad_rows(file.path, asked, Path(folder)))
        problems.raise_any()
        assert served is not None
        classifier = Classifier(served, asked.max_tokens_per_device)
        if source is None:
            if asked.text:
                windows: Iterable[pa.RecordBatch] = [text_batch(asked.text)]
            else:
                windows = standard_input()
            _answer(windows, classifier, asked.output_file)
        elif asked.output_file is None:
            _answer(source.windows(), classifier, None)
            if source.bad.count:
                _warn(source.bad.left_out())
        else:
            _label_file(source, classifier, Path(asked.output_file))
            if rank_of(os.environ) == 0:
                _keep_rejected(source, Path(folder), Path(asked.output_file))


def _check_launch(asked: PredictFlags) -> None:
    """Refuse a launch that would not do what was asked for."""
    launch = read_launch(os.environ)
    if launch.world_size > 1 and (asked.input_file is None or asked.output_file is None):
        raise UserError("predict-of-many-processes", "--num_processes", launch.world_size)


@dataclass(frozen=True)
class InputFile:
    """A file whose rows were read once.

    Attributes:
        file: of the texts.
        rows: how many there are.
        bad: the rows that cannot be read.
    """

    file: TextFile
    rows: int
    bad: BadRows

    @classmethod
    def of(cls, file: TextFile, bad: BadRows) -> InputFile:
        """Read a file to its end, so that it is refused before the weights are read.

        Raises:
            UserError: with every problem of the file.
        """
        with attributed_to("--input_file"):
            rows = sum(batch.num_rows for batch in file.windows(bad))
            bad.finish(rows)
        for remark in bad.remarks if rank_of(os.environ) == 0 else ():
            print(f"--input_file {remark}", file=sys.stderr)
        return cls(file, rows, bad)

    def windows(self) -> Iterator[pa.RecordBatch]:
        """The readable rows."""
        return self.file.windows(BadRows(self.file.path, self.bad.skips_damage))


def _answer(windows: Iterable[pa.RecordBatch], classifier: Classifier, output: str | None) -> None:
    labelled = (label(classifier, window) for window in windows)
    if output is not None:
        write_output(Path(output), labelled)
        return
    for batch in labelled:
        sys.stdout.write(as_json_lines(batch))
        sys.stdout.flush()


def _label_file(source: InputFile, classifier: Classifier, output: Path) -> None:
    """Label a file. Ranks take turns with its windows, and rank 0 writes the output when all are labelled."""
    rank, world_size = rank_of(os.environ), world_size_of(os.environ)
    windows = LabelledWindows(output, _job(source, classifier), -(-source.rows // WINDOW_ROWS))
    if rank == 0:
        windows.open()
    elif not windows.wait_until_open():
        return
    with LabellingProgress(source.rows, windows.done() * WINDOW_ROWS, is_shown=rank == 0) as progress:
        for number, batch in enumerate(source.windows()):
            if number % world_size == rank and not windows.has(number):
                windows.put(number, label(classifier, batch))
                progress.show(windows.done() * WINDOW_ROWS)
        while rank == 0 and windows.done() < windows.count:
            time.sleep(LOOK_EVERY_S)
            progress.show(windows.done() * WINDOW_ROWS)
    if rank == 0:
        windows.finish()
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
        _warn(source.bad.left_out())
        print(f"Rows that were left out, with reasons: {kept}", file=sys.stderr)


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)
