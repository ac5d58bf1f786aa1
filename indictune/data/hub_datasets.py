"""Rows of a dataset on the Hub, or of a folder laid out like one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import LINES_OF_A_FILE, BadRows
from indictune.data.cache import file_digest
from indictune.data.columns import check_columns, check_schema, shortened, text_batch, typed_rows
from indictune.data.json_rows import holds_lines
from indictune.data.read_files import Record, read_batches, read_records
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_CHUNK_ROWS = 20_000
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON_EXTENSIONS = (".json", ".jsonl", ".ndjson")
# In the way that csv files are read; the chunks change no cell.
_HARMLESS = {"sep", "chunksize"}
# In the way that json files are read: each of these changes what a file says.
_JSON_SETTINGS = ("encoding", "encoding_errors", "field")


@dataclass(frozen=True)
class _Files:
    """A split that is files of rows, which are read here and not by `datasets`.

    Attributes:
        split: its name.
        files: on this machine, at least one.
        class_names: column -> what its numbers stand for, from 0, as the dataset's README.md declares.
    """

    split: str
    files: tuple[str, ...]
    class_names: Mapping[str, Sequence[str]]


class CsvFiles(_Files):
    """csv or tsv files: pandas, by which `datasets` 5 reads them, takes the first field of a row for an index where
    rows have more fields than the header, and "NA" and "None" for no text.
    """


class JsonFiles(_Files):
    """json or jsonl files: where one row of thousands has a number for a text, or a list for it, `datasets` 5 writes
    all texts of the column as JSON, in quotes. It writes 1e5 as 100000, and keeps one of two equal keys in silence.
    """


def load_hub_dataset(
    name: str, config: str | None, is_read: bool = True
) -> Mapping[str, Dataset | CsvFiles | JsonFiles]:
    """The splits of a dataset by name, from the cache where it is there.

    Args:
        name: of the dataset, or its folder.
        config: `--dataset_config_name`.
        is_read: False looks only whether there is such a dataset; nothing is downloaded, and there are no splits.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    origin = f"--dataset_name {name}"
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        if not is_read:
            return {}
        if builder.name in ("csv", "json"):
            found = _csv_files(builder, origin) if builder.name == "csv" else _json_files(builder, origin)
        else:
            found = datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"{origin}: no such dataset on the Hub, or it is private (then log in with `hf auth login`); "
            "rows on this machine are given as --train_file FILE."
        ) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError(
            f"{origin}: the Hub cannot be reached and the dataset is not in the cache; "
            "give --train_file FILE, or a --dataset_name that begins with builtin:, which needs no network."
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        told = error.__cause__ or error  # "An error occurred while generating the dataset" has it as its cause
        reason = str(told).splitlines()[0] if str(told) else type(told).__name__
        raise UserError(
            f"{origin}: cannot be loaded: {reason} (--dataset_config_name names a configuration)"
        ) from error
    if "train" not in found:
        raise UserError(f"{origin}: no split called train; it has {', '.join(map(str, found))}.")
    made_of = builder.info.builder_name
    if made_of in ("csv", "json") and made_of != builder.name:
        raise UserError(
            f"{origin}: without the network there is only what `datasets` has made of its {made_of} files, which may "
            "have changed texts and labels. Download the files, and give them by --train_file FILE, or their folder "
            "by --dataset_name."
        )
    return dict(found)


def _csv_files(builder: DatasetBuilder, origin: str) -> dict[str, CsvFiles]:
    """The splits of a dataset of csv files, downloaded where they are not on this machine.

    Raises:
        UserError: files of another kind are among them, or its README.md says that they are written in another way.
    """
    from datasets.packaged_modules.csv.csv import CsvConfig

    way_out = (
        "Download the files, write them as csv in UTF-8 with one header line, and give them by --train_file FILE."
    )
    config = builder.config
    assert isinstance(config, CsvConfig)
    plain = CsvConfig().pd_read_csv_kwargs
    other = sorted(name for name, value in config.pd_read_csv_kwargs.items() if value != plain[name])
    if told := [name for name in other if name not in _HARMLESS]:
        raise UserError(f"{origin}: its README.md has {', '.join(told)} for its csv files. {way_out}")
    for file in (file for of_split in config.data_files.values() for file in of_split):
        if _SEPARATORS.get(Path(file).suffix.lower()) != config.sep:
            raise UserError(f"{origin}: {file} is no plain csv (commas) or tsv (tabs) file. {way_out}")
    return {split: CsvFiles(split, files, names) for split, files, names in _downloaded(builder)}


def _json_files(builder: DatasetBuilder, origin: str) -> dict[str, JsonFiles]:
    """The splits of a dataset of json files, downloaded where they are not on this machine.

    Raises:
        UserError: files of another kind are among them, or its README.md says that they are written in another way.
    """
    from datasets.packaged_modules.json.json import JsonConfig

    way_out = "Download the files, write them as jsonl in UTF-8, and give them by --train_file FILE."
    config = builder.config
    assert isinstance(config, JsonConfig)
    plain = JsonConfig()
    if told := [name for name in _JSON_SETTINGS if getattr(config, name) != getattr(plain, name)]:
        raise UserError(f"{origin}: its README.md has {', '.join(told)} for its json files. {way_out}")
    for file in (file for of_split in config.data_files.values() for file in of_split):
        if Path(file).suffix.lower() not in _JSON_EXTENSIONS:
            raise UserError(f"{origin}: {file} is no plain {', '.join(_JSON_EXTENSIONS)} file. {way_out}")
    return {split: JsonFiles(split, files, names) for split, files, names in _downloaded(builder)}


def _downloaded(builder: DatasetBuilder) -> Iterator[tuple[str, tuple[str, ...], dict[str, list[str]]]]:
    """Each split, its files on this machine, and the names of classes by column."""
    import datasets

    features = builder.info.features or {}
    class_names = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    files = datasets.DownloadManager().download(builder.config.data_files)
    for split, of_split in files.items():
        yield str(split), tuple(of_split), class_names


def _check_files(name: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse a dataset whose README.md names files outside it, which `datasets` 5 reads: on this machine or anywhere.

    Args:
        name: of the dataset, or its folder.
        files: of each split: paths, or `hf://datasets/OWNER/NAME@COMMIT/PATH`.
    """
    folder = Path(name).resolve()
    outside = [
        file
        for file in dict.fromkeys(file for of_split in files.values() for file in of_split)
        if not (Path(file).resolve().is_relative_to(folder) if folder.is_dir() else _is_of_hub(file, name))
    ]
    if outside:
        raise UserError(
            f"--dataset_name {name}: its README.md names {', '.join(map(repr, outside[:3]))}, outside the dataset. Do "
            "not use it, or give the files that you want by --train_file."
        )


def _is_of_hub(file: str, name: str) -> bool:
    return file.startswith(f"hf://datasets/{name}@") and ".." not in PurePosixPath(file).parts


def fingerprint_of(rows: Dataset | CsvFiles | JsonFiles) -> str:
    """Of the content of a split. `datasets` makes it of the files, their commit and how they are read."""
    if isinstance(rows, _Files):
        return repr([rows.class_names, *((file, file_digest(file)) for file in rows.files)])
    return str(rows._fingerprint)


def name_of(split: str, rows: Dataset | CsvFiles | JsonFiles) -> str:
    """A split as messages name it: by its file, where it is one."""
    return rows.files[0] if isinstance(rows, _Files) and len(rows.files) == 1 else split


def hub_batches(
    rows: Dataset | CsvFiles | JsonFiles, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset gives them.

    Args:
        rows: of the split.
        columns: as of `read_batches`, like `optional`. The json rows of a test split may lack the label's.
        bad: gets the rows that cannot be used, and the files of the split, of which lines are `LINES_OF_A_FILE` apart.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    if isinstance(rows, JsonFiles) and rows.split == "test":
        optional = {**optional, "label": columns["label"]}
        columns = {role: name for role, name in columns.items() if role != "label"}
    if isinstance(rows, _Files):
        yield from _file_batches(rows, columns, optional, bad)
    else:
        yield from _typed_batches(rows, columns, optional, bad)


def hub_records(rows: Dataset | JsonFiles, bad: BadRows) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`.

    Args:
        rows: of the split.
        bad: gets the rows that cannot be read, and the files of the split, as of `hub_batches`.

    Raises:
        UserError: the split has no rows, or cannot be read.
    """
    if isinstance(rows, JsonFiles):
        yield from _file_records(rows, bad)
    else:
        yield from _typed_records(rows, bad)


def _file_batches(
    rows: _Files, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[pa.RecordBatch]:
    """The rows of all files, by lines that tell the file too."""
    names = {role: rows.class_names.get(name) for role, name in {**optional, **columns}.items()}
    declared: dict[str, Mapping[str, str | None]] = {}
    if of_labels := names["label"]:
        declared["label"] = _by_number_or_name(rows.split, of_labels)
    if of_languages := names.get("language"):
        declared["language"] = _languages(of_languages)
    bad.files = rows.files
    for number, file in enumerate(rows.files):
        batches = read_batches(file, columns, optional, bad, _extension(file))
        while True:
            with bad.reading(number):
                batch = next(batches, None)
                if batch is not None:
                    batch = _with_class_names(batch, declared, bad)
            if batch is None:
                break
            lines = pc.add(batch["line"], number * LINES_OF_A_FILE)
            yield batch.set_column(batch.schema.get_field_index("line"), "line", lines)


def _file_records(rows: JsonFiles, bad: BadRows) -> Iterator[Record]:
    bad.files = rows.files
    for number, file in enumerate(rows.files):
        records = read_records(file, bad, _extension(file))
        while True:
            with bad.reading(number):
                found = next(records, None)
            if found is None:
                break
            line, record = found
            yield number * LINES_OF_A_FILE + line, record


def _extension(file: str) -> str:
    """That of files which are read like this one: on the Hub, .json is often one object a line."""
    extension = Path(file).suffix.lower()
    if extension == ".ndjson" or (extension == ".json" and holds_lines(file)):
        return ".jsonl"
    return extension


def _typed_batches(
    rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[pa.RecordBatch]:
    import datasets

    split = str(rows.split)
    check_columns(split, rows.column_names, columns)
    if not len(rows):
        raise UserError(f"{split}: the split holds no rows.")
    names = {**columns, **{role: name for role, name in optional.items() if name in rows.column_names}}
    kinds = {role: rows.features[name] for role, name in names.items()}
    declared = {
        role: _by_number(split, kind.names) if role == "label" else _languages(kind.names)
        for role, kind in kinds.items()
        if role in ("label", "language") and isinstance(kind, datasets.ClassLabel)
    }
    first_row = 1
    for table in rows.select_columns(list(dict.fromkeys(names.values()))).with_format("arrow").iter(_CHUNK_ROWS):
        (read,) = table.combine_chunks().to_batches()
        batch = text_batch(read, names, list(optional), split, first_row, bad)
        yield _with_class_names(batch, declared, bad)
        first_row += read.num_rows


def _typed_records(rows: Dataset, bad: BadRows) -> Iterator[Record]:
    if not len(rows):
        raise UserError(f"{rows.split}: the split holds no rows.")
    first_row = 1
    for table in rows.with_format("arrow").iter(_CHUNK_ROWS):
        check_schema(str(rows.split), table.schema)
        (read,) = table.combine_chunks().to_batches()
        yield from typed_rows(read, first_row, bad)
        first_row += read.num_rows


def _by_number(split: str, names: Sequence[str]) -> dict[str, str | None]:
    """A label as it is written -> its class. The Hub marks a row without a label by -1.

    Raises:
        UserError: a name is no text, such as the `no` of YAML.
    """
    if other := [name for name in names if not isinstance(name, str)]:
        raise UserError(
            f"{split}: its README.md declares a class {other[0]!r}, which is no text; without quotes, YAML makes a "
            "number or a boolean of it. Give the files by --train_file, where labels are what stands there."
        )
    return {"-1": None, "": None} | {str(number): name for number, name in enumerate(names)}


def _by_number_or_name(split: str, names: Sequence[str]) -> dict[str, str | None]:
    """As `_by_number`, for files, which may have the names too.

    Raises:
        UserError: a name is no text, or the number of another class, and nothing tells which of them a file means.
    """
    numbers = _by_number(split, names)
    if doubtful := [name for name in names if numbers.get(name, name) != name]:
        raise UserError(
            f"{split}: its README.md declares classes whose names are numbers of others "
            f"({', '.join(map(shortened, doubtful[:5]))}). Give the files by --train_file, where labels are what "
            "stands there."
        )
    return numbers | {name: name for name in names}


def _languages(names: Sequence[str]) -> dict[str, str | None]:
    """A language's number, as it is written -> its name. What has none stays: nobody may have asked for the column."""
    return {"-1": None} | {str(number): name for number, name in enumerate(names) if isinstance(name, str)}


def _with_class_names(
    batch: pa.RecordBatch, declared: Mapping[str, Mapping[str, str | None]], bad: BadRows
) -> pa.RecordBatch:
    """Classes in place of their numbers, in the columns of labels and languages."""
    if known := declared.get("language"):
        named = [known.get(language, language) for language in batch["language"].to_pylist()]
        place = batch.schema.get_field_index("language")
        batch = batch.set_column(place, "language", pa.array(named, pa.string()))
    return _with_labels(batch, declared["label"], bad) if "label" in declared else batch


def _with_labels(batch: pa.RecordBatch, known: Mapping[str, str | None], bad: BadRows) -> pa.RecordBatch:
    """Classes in place of numbers; a name stays as it is written. `bad` gets the rows with another label."""
    written = [label or "" for label in batch["label"].to_pylist()]
    labels = [label.strip() for label in written]
    good = [label in known for label in labels]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        row = batch.slice(index, 1).to_pylist()[0]
        names = dict.fromkeys(name for name in known.values() if name is not None)
        expected = ", ".join(map(shortened, list(names)[:20]))
        reason = f"label {shortened(labels[index])} is none of those that the dataset declares ({expected})."
        bad.add(row.pop("line"), reason, row, "an undeclared label")
    named = [
        as_is if known.get(label) == label else known.get(label) for as_is, label in zip(written, labels, strict=True)
    ]
    batch = batch.set_column(batch.schema.get_field_index("label"), "label", pa.array(named, pa.string()))
    return batch.filter(pa.array(good, pa.bool_()))
