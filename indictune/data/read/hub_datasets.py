"""Find the splits of a dataset on the Hub or of a folder with its layout, and read their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import BadRows, numbered_files
from indictune.data.cache import content_digest, with_column
from indictune.data.columns import check_schema, existing_columns, numbered_rows, text_batches
from indictune.data.read.arrow_files import arrow_errors, names_by_value, with_names
from indictune.data.read.file_form import DELIMITERS, STANDARD, FileForm
from indictune.data.read.open_files import saved_splits
from indictune.data.read.read_files import CHUNK_ROWS, Record, read_batches, read_records
from indictune.errors import Problems, UserError, problem
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, Features

_FLAG = "--dataset_name"
_EXTENSIONS = {"csv": (".csv", ".tsv"), "json": (".json", ".jsonl", ".ndjson")}  # by the builder's name
# Settings of `datasets` that change no value.
_HARMLESS = ("name", "version", "description", "data_dir", "data_files", "features", "sep", "chunksize")


@dataclass(frozen=True)
class SplitFiles:
    """A split of files, which we read.

    `datasets` 5 changes what csv and json files hold. For csv files it calls pandas. Pandas takes the first field for
    an index where rows have more fields than the header, and "NA" and "None" for missing texts. Where one json row of
    thousands has a number or a list for a text, `datasets` writes all texts of the column as JSON, in quotes. It
    writes 1e5 as 100000, and silently drops one of two equal keys.

    Attributes:
        files: on this machine, at least one.
        split: its name in a dataset.
        class_names: column -> names of the classes 0, 1, ..., as the dataset's README.md declares them.
    """

    files: tuple[str, ...]
    split: str = ""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


SplitRows: TypeAlias = "Dataset | SplitFiles"


def load_hub_dataset(name: str, config: str | None, is_read: bool = True) -> Mapping[str, SplitRows]:
    """The splits of a dataset by name, from the cache if it is there.

    Args:
        name: of the dataset, or its folder.
        config: `--dataset_config_name`.
        is_read: False only checks that the dataset exists: nothing is downloaded, no splits are returned.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    if saved := saved_splits(name):
        return _with_train(name, {split: SplitFiles(files, split) for split, files in saved.items()})
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        if not is_read:
            return {}
        of_files = builder.name in _EXTENSIONS
        found = _splits_of_files(builder, name) if of_files else dict(datasets.load_dataset(name, config))
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError("dataset-missing", _FLAG, name) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError("dataset-unreachable", _FLAG, name) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of "An error occurred while generating the dataset"
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise UserError("dataset-unreadable", _FLAG, name, reason=reason) from error
    _with_train(name, found)
    if not of_files and builder.info.builder_name in _EXTENSIONS:
        raise UserError("dataset-converted", _FLAG, name, kind=builder.info.builder_name)
    return found


def _with_train(name: str, splits: dict[str, SplitRows]) -> dict[str, SplitRows]:
    """The splits, if they have training rows."""
    if "train" not in splits:
        raise UserError("train-split-missing", _FLAG, name, splits=", ".join(map(str, splits)))
    return splits


def declared_class_names(rows: SplitRows) -> Mapping[str, Sequence[str]]:
    """Column -> names of the classes 0, 1, ... that the dataset declares."""
    return rows.class_names if isinstance(rows, SplitFiles) else _declared(rows.features)


def fingerprint_of(rows: SplitRows) -> str:
    """Digest of the content of a split."""
    if isinstance(rows, SplitFiles):
        return repr([rows.class_names, *((file, content_digest(file)) for file in rows.files)])
    return digest_of_split(rows)


def split_name(split: str, rows: SplitRows) -> str:
    """A split as messages name it: by its file, if it is one."""
    return rows.files[0] if isinstance(rows, SplitFiles) and len(rows.files) == 1 else split


def _splits_of_files(builder: DatasetBuilder, name: str) -> dict[str, SplitRows]:
    """The splits of a dataset of csv or json files, downloaded unless they are on this machine.

    Raises:
        UserError: it has files of another kind, or its README.md declares settings that change what they hold.
    """
    import datasets

    kind, config = builder.name, builder.config
    plain, names = type(config)(), [each.name for each in fields(config) if each.name not in _HARMLESS]
    if changed := sorted(each for each in names if getattr(config, each) != getattr(plain, each)):
        raise UserError("dataset-settings", _FLAG, name, settings=", ".join(changed), kind=kind)
    for file in (file for of_split in config.data_files.values() for file in of_split):
        extension = Path(file).suffix.lower()
        if extension not in _EXTENSIONS[kind] or (kind == "csv" and DELIMITERS[extension] != config.sep):
            raise UserError("dataset-file-kind", _FLAG, name, file=file, expected=", ".join(_EXTENSIONS[kind]))
    declared = _declared(builder.info.features or {})
    files = datasets.DownloadManager().download(config.data_files)
    return {str(split): SplitFiles(tuple(of_split), str(split), declared) for split, of_split in files.items()}


def _declared(features: Features | Mapping[str, Any]) -> dict[str, Sequence[str]]:
    import datasets

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def _check_files(name: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse a dataset whose README.md names files outside it. `datasets` 5 reads them, wherever they are.

    The files of each split are paths, or `hf://datasets/OWNER/NAME@COMMIT/PATH`.
    """
    folder = Path(name).resolve()
    outside = [
        file
        for file in dict.fromkeys(file for of_split in files.values() for file in of_split)
        if not (Path(file).resolve().is_relative_to(folder) if folder.is_dir() else _is_of_dataset(file, name))
    ]
    if outside:
        raise UserError("dataset-files-outside", _FLAG, name, files=", ".join(map(repr, outside[:3])))


def _is_of_dataset(file: str, name: str) -> bool:
    return file.startswith(f"hf://datasets/{name}@") and ".." not in PurePosixPath(file).parts


def split_batches(
    rows: SplitRows,
    bad: BadRows,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    lists: frozenset[str] = frozenset(),
    form: FileForm = STANDARD,
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset declares.

    Args:
        bad: gets the rows that cannot be used, and the files of the split if it has several.
        columns: as of `read_batches`, like `optional`. The test split of a dataset may lack the label.
        optional: columns that may be missing.
        lists: as of `read_batches`, like `form`.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    if str(rows.split) == "test":
        optional = {**optional, "label": columns["label"]}
        columns = {role: name for role, name in columns.items() if role != "label"}
    declared = declared_class_names(rows)
    names = {role: declared[name] for role, name in {**optional, **columns}.items() if name in declared}
    are_files = isinstance(rows, SplitFiles)
    classes = {
        role: names_by_value(of_role, str(rows.split), are_files) for role, of_role in names.items() if role != "text"
    }
    if isinstance(rows, SplitFiles):
        batches = _batches_of_files(rows, bad, columns, optional, lists, form)
    else:
        present = existing_columns(str(rows.split), rows.column_names, columns, optional)
        stored = _arrow_batches(rows.select_columns(list(dict.fromkeys(present.values()))))
        batches = text_batches(stored, present, optional, str(rows.split), lists)
    for batch in batches:
        for role, known in classes.items():
            batch = with_names(batch, role, known, bad)
        yield batch


def split_records(rows: SplitRows, bad: BadRows) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`; arguments as of `split_batches`.

    Raises:
        UserError: the split has no rows, or cannot be read.
    """
    if isinstance(rows, SplitFiles):
        for file, offset in numbered_files(rows.files, bad):
            for line, record in read_records(file, bad):
                yield offset + line, record
    else:
        check_schema(str(rows.split), rows.features.arrow_schema)
        with arrow_errors(str(rows.split)):
            yield from numbered_rows(_arrow_batches(rows))


def _batches_of_files(
    rows: SplitFiles,
    bad: BadRows,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    lists: frozenset[str],
    form: FileForm,
) -> Iterator[pa.RecordBatch]:
    problems = Problems()
    for file, offset in numbered_files(rows.files, bad):
        with problems.collecting():
            for batch in read_batches(file, columns, optional, bad, lists, form):
                yield with_column(batch, "line", pc.add(batch["line"], offset)) if offset else batch
    missing = [str(each.value) for each in problems if each.code == "column-missing"]
    if missing and (others := {*rows.files} - {str(each.value) for each in problems}):
        problems.append(problem("files-differ", value=missing[0], other=min(others)))
    problems.raise_any()


def _arrow_batches(rows: Dataset) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.combine_chunks().to_batches()
