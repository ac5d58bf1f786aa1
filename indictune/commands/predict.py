"""`indictune predict`: label texts from the command line, standard input or a file; a killed command resumes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from indictune.config.early_values import check_exists
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import EngineArguments, TextFileArguments, flag
from indictune.data.bad_rows import REJECTED, BadRows, bad_rows
from indictune.data.read.delimited import DELIMITERS
from indictune.data.read.open_files import files_named
from indictune.distributed.launch import rank_of, read_launch
from indictune.errors import Problem, Problems, UserError, attributed_to, problem
from indictune.files import NO_ROOM, REFUSED, check_outside_checkpoints
from indictune.models.adapters import base_of
from indictune.models.atomic_folder import MODEL_FILES
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction import labelled_rows
from indictune.prediction.input_parts import InputFiles, InputPart, local_versions, read_parts
from indictune.prediction.labelled_parts import FLAG, LabelledParts, is_folder, label_input
from indictune.prediction.labelled_rows import TextFile, label, text_batch
from indictune.prediction.served_classifier import Classifier, ServedModel, check_pairs, served_model
from indictune.prediction.stores import Store, is_url, whole
from indictune.prediction.written_rows import KINDS, MOST_SHEET_ROWS, as_json_lines, writer_of
from indictune.ray_cluster import cluster
from indictune.stop_signals import EXIT_RESUMABLE, Stopped
from indictune.upstream import versions_of

_RANK_0_WAIT_S = 5.0  # how long another rank waits for rank 0, which has the same problem, to report it


@dataclass
class PredictFlags(TextFileArguments, EngineArguments):
    """Which texts a finished classifier labels, and where the labels go. Other values default to its training's."""

    needed = ("model", 'indictune predict FOLDER --text "...", with the --output_dir of a finished run.')

    text: list[str] = flag([], "Texts to label. Default: standard input, one text a line, or two with a tab between.")
    text_pair: list[str] = flag([], "Second texts, one for each of --text, for a model of pairs.")
    output_file: str | None = flag(
        None,
        "Gets the labels: a csv, tsv, jsonl, parquet or xlsx file, which must not exist. Or a folder for parquet "
        "files: labels/ or s3://bucket/labels/. Default: JSON lines on standard output.",
    )
    excel: bool = flag(False, "Begin a csv or tsv file with a byte order mark, so that Excel reads it as UTF-8.")

    def check(self) -> Iterator[Problem]:
        """Refuse texts from two places, and second texts without a first one each."""
        yield from super().check()
        if self.text and self.input_file is not None:
            yield problem("two-text-sources", "--text", other=f"--input_file {self.input_file}")
        if self.excel and Path(self.output_file or "").suffix.lower() not in DELIMITERS:
            yield problem("no-effect", "--excel", "true", other=f"--output_file {self.output_file or '(none)'}")
        if self.engine == "ray" and (self.input_file is None or not is_folder(self.output_file or "")):
            yield problem("engine-needs-folder", "--engine", "ray", output=self.output_file or "(none)")
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
            source = problems.attempt(_input, asked, served, Path(folder))
        elif served is not None and asked.text:
            problems.attempt(check_pairs, served.reading, bool(asked.text_pair), "--text_pair")
        rows = 0 if source is None else source.rows or 0
        if rows > MOST_SHEET_ROWS and str(asked.output_file).lower().endswith(".xlsx"):
            problems.append(problem("sheet-full", FLAG, asked.output_file, rows=rows))
        problems.raise_any()
        assert served is not None
        if source is not None and asked.engine == "ray":
            with cluster(asked.ray_address):
                from indictune.prediction.on_ray import label_on_ray  # slow to import, and of an extra

                labelled = LabelledParts(str(asked.output_file), job_of(source, served))
                label_on_ray(source, labelled, asked)
            _keep_rejected(source, Path(folder), labelled)
            return
        classifier = Classifier(served, asked.max_tokens_per_device)
        if source is None:
            texts = list(zip(asked.text, asked.text_pair, strict=True)) if asked.text_pair else asked.text
            are_pairs = served.reading.text_pair_column is not None
            windows = iter([text_batch(texts)]) if asked.text else labelled_rows.standard_input(are_pairs)
            _answer(windows, classifier, asked.output_file, asked.excel)
        elif asked.output_file is None:
            _answer(_all_windows(source, asked, Path(folder)), classifier, None)
            if source.bad.count:
                print(f"warning: {source.bad.left_out()}", file=sys.stderr)
        else:
            labelled = LabelledParts(asked.output_file, job_of(source, served))
            label_input(source, labelled, partial(label, classifier), asked, asked.excel)
            if rank_of(os.environ) == 0:
                _keep_rejected(source, Path(folder), labelled)


def _input(asked: PredictFlags, served: ServedModel, folder: Path) -> InputFiles:
    """The files of `--input_file`. The first process reads one local file to its end, and the begin of many files."""
    file, named = labelled_rows.text_file(asked, served.reading), str(asked.input_file)
    with attributed_to(file.flag):
        found = Store(named, file.flag).files(named) if is_url(named) else dict.fromkeys(files_named(named, "test")[1])
        if not found:
            raise UserError("no-files-match", value=named)
    first, is_first_process = TextFile(next(iter(found)), file.wanted), rank_of(os.environ) == 0
    bad = bad_rows(first.path, asked, folder)
    if len(found) == 1 and not is_url(named):
        if is_first_process:
            return InputFiles.of(first, bad)
        check_exists(first.path)
    versions = found if is_url(named) else local_versions(found)
    source = InputFiles(first, {path: str(version) for path, version in versions.items()}, bad)
    if is_first_process and len(found) > 1:
        try:
            with attributed_to(file.flag):
                _, windows = next(read_parts(source.parts[:1], first, lambda part: BadRows(part.file)))
                next(windows)
        except UserError as error:  # of one file; the others may be whole
            if asked.bad_rows == "stop" or any(each.code == "column-missing" for each in error.problems):
                raise
    return source


def _all_windows(source: InputFiles, asked: PredictFlags, folder: Path) -> Iterator[pa.RecordBatch]:
    collectors = list[BadRows]()

    def bad_of(part: InputPart) -> BadRows:
        collectors.append(BadRows(part.file, True) if part.crc is not None else bad_rows(part.file, asked, folder))
        return collectors[-1]

    for part, windows in read_parts(source.parts, source.file, bad_of):
        yield from windows
        if part.crc is None and collectors[-1].count:
            print(f"warning: {collectors[-1].left_out()}", file=sys.stderr)


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


def job_of(source: InputFiles, served: ServedModel) -> dict[str, Any]:
    """All that the labels depend on: the files, the model, and how texts are read."""
    folder = Path(served.args.model_name_or_path)
    folders = [folder, *([Path(base_of(folder).name)] if (folder / ADAPTER_CONFIG).is_file() else [])]
    files = sorted({path for each in folders for pattern in MODEL_FILES for path in each.glob(pattern)})
    model = [local_versions(map(str, files)), versions_of(("tokenizers", "transformers"))]
    columns = {"wanted": asdict(source.file.wanted), "skips_damage": source.bad.skips_damage}
    return {"files": source.versions, "model": model, "reading": asdict(served.reading), **columns}


def _keep_rejected(source: InputFiles, folder: Path, labelled: LabelledParts) -> None:
    rejected = folder / REJECTED
    if rejected.exists():
        kept = f"{labelled.output}.{REJECTED}"
        if labelled.is_folder:
            kept = labelled.store.path(f"_{REJECTED}")
            labelled.store.write(f"_{REJECTED}", lambda file: file.write(rejected.read_bytes()))
        else:
            shutil.copyfile(rejected, kept)
        print(f"warning: {source.bad.left_out()}", file=sys.stderr)
        print(f"Rows that were left out, with reasons: {kept}", file=sys.stderr)


def check_output(path: str) -> None:
    """Refuse an output that exists, of an unknown kind, or in no folder. A folder goes on."""
    if is_folder(path):
        if not path.endswith("/") and is_url(path) and Path(path).suffix.lower() in KINDS:
            raise UserError("output-url-of-file", FLAG, path)
        return
    writer_of(path)
    output = Path(path)
    check_outside_checkpoints(output, FLAG)
    if os.path.lexists(output):
        raise UserError("output-exists", FLAG, output)
    if not output.parent.is_dir():
        raise UserError("no-output-folder", FLAG, output, folder=output.parent)


def write_output(output: Path, batches: Iterable[pa.RecordBatch], for_excel: bool = False) -> None:
    """Write labelled rows, whole or not at all; `output-not-written` if the disk refuses."""
    try:
        with whole(output, output.parent) as file:
            writer_of(str(output), for_excel)(file, batches)
    except OSError as error:
        if error.errno not in NO_ROOM | REFUSED:
            raise
        raise UserError("output-not-written", FLAG, output, reason=error.strerror) from error
