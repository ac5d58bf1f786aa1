"""Rows of a dataset on the Hub, or of a folder laid out like one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.cache import file_digest
from indictune.data.columns import check_columns, shortened, text_batch
from indictune.data.reading import Record, read_batches
from indictune.data.rejects import BadRows
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import ClassLabel, Dataset, DatasetBuilder

_CHUNK_ROWS = 20_000
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
# In the way that csv files are read; the chunks change no cell.
_HARMLESS = {"sep", "chunksize"}


@dataclass(frozen=True)
class CsvFiles:
    """A split that is csv or tsv files. They are read here, for pandas, by which `datasets` 5 reads them, takes the
    first field of a row for an index where rows have more fields than the header, and "NA" and "None" for no text.

    Attributes:
        files: on this machine, at least one.
        class_names: column -> what its numbers stand for, from 0, as the dataset's README.md declares.
    """

    files: tuple[str, ...]
    class_names: Mapping[str, Sequence[str]]


def load_hub_dataset(name: str, config: str | None) -> Mapping[str, Dataset | CsvFiles]:
    """The splits of a dataset by name, from the cache where it is there.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    origin = f"--dataset_name {name}"
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        found = _csv_files(builder, origin) if builder.name == "csv" else datasets.load_dataset(name, config)
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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{origin}: cannot be loaded: {reason} (--dataset_config_name names a configuration)"
        ) from error
    if "train" not in found:
        raise UserError(f"{origin}: no split called train; it has {', '.join(map(str, found))}.")
    if builder.name != "csv" and builder.info.builder_name == "csv":
        raise UserError(
            f"{origin}: without the network there is only what `datasets` has made of its csv files, which may have "
            "changed texts and labels (NA becomes none). Download the files, and give them by --train_file FILE."
        )
    return dict(found)


def _csv_files(builder: DatasetBuilder, origin: str) -> dict[str, CsvFiles]:
    """The splits of a dataset of csv files, downloaded where they are not on this machine.

    Raises:
        UserError: files of another kind are among them, or its README.md says that they are written in another way.
    """
    import datasets
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
    features = builder.info.features or {}
    class_names = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    files = datasets.DownloadManager().download(config.data_files)
    return {str(split): CsvFiles(tuple(of_split), class_names) for split, of_split in files.items()}


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


def fingerprint_of(rows: Dataset | CsvFiles) -> str:
    """Of the content of a split. `datasets` makes it of the files, their commit and how they are read."""
    if isinstance(rows, CsvFiles):
        return repr([rows.class_names, *((file, file_digest(file)) for file in rows.files)])
    return str(rows._fingerprint)


def csv_batches(
    rows: CsvFiles, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`. Those of several files are numbered through, and where one
    cannot be read, its file and line are told.

    Raises:
        UserError: as `read_batches`.
    """
    names = rows.class_names.get(columns["label"])
    first_row = 1
    for file in rows.files:
        batches = read_batches(file, columns, optional, bad)
        while True:
            with bad.naming(file):
                batch = next(batches, None)
                if batch is not None and names is not None:
                    batch = _with_class_names(batch, names, bad)
            if batch is None:
                break
            if len(rows.files) > 1:
                numbers = pa.array(range(first_row, first_row + batch.num_rows), pa.int32())
                batch = batch.set_column(batch.schema.get_field_index("line"), "line", numbers)
                first_row += batch.num_rows
            yield batch


def hub_batches(rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset gives them.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    import datasets

    split = str(rows.split)
    check_columns(split, rows.column_names, columns)
    if not len(rows):
        raise UserError(f"{split}: the split holds no rows.")
    _check_times(rows, columns)
    names = {**columns, **{role: name for role, name in optional.items() if name in rows.column_names}}
    label = rows.features[names["label"]]
    first_row = 1
    for table in rows.select_columns(list(dict.fromkeys(names.values()))).with_format("arrow").iter(_CHUNK_ROWS):
        (batch,) = table.combine_chunks().to_batches()
        if isinstance(label, datasets.ClassLabel):
            batch = batch.set_column(
                batch.schema.get_field_index(names["label"]),
                names["label"],
                _class_names(batch[names["label"]], label),
            )
        yield text_batch(batch, names, list(optional), split, first_row)
        first_row += batch.num_rows


def hub_records(rows: Dataset) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`.

    Raises:
        UserError: the split has no rows.
    """
    if not len(rows):
        raise UserError(f"{rows.split}: the split holds no rows.")
    tables = rows.with_format("arrow").iter(_CHUNK_ROWS)
    yield from enumerate((row for table in tables for row in table.to_pylist()), 1)


def _check_times(rows: Dataset, columns: Mapping[str, str]) -> None:
    """Refuse texts of a json file that all look like a time: `datasets` makes times of them, written another way."""
    for role, name in columns.items():
        if rows.builder_name == "json" and str(getattr(rows.features[name], "dtype", "")).startswith("timestamp"):
            raise UserError(
                f"{rows.split}: all of column {shortened(name)} (--{role}_column) are dates, which `datasets` writes "
                "in its own way. Name another column, or download the file and give it by --train_file."
            )


def _with_class_names(batch: pa.RecordBatch, names: Sequence[str], bad: BadRows) -> pa.RecordBatch:
    """Names in place of the numbers of classes; `bad` gets the rows whose label is neither of them."""
    known: dict[str, str | None] = {"-1": None, "": None}  # the Hub marks a row without a label by -1
    known |= {str(number): name for number, name in enumerate(names)} | {name: name for name in names}
    labels = [(label or "").strip() for label in batch["label"].to_pylist()]
    good = [label in known for label in labels]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        row = batch.slice(index, 1).to_pylist()[0]
        expected = ", ".join(map(shortened, names[:20]))
        reason = f"label {shortened(labels[index])} is none of those that its README.md declares ({expected})."
        bad.add(row.pop("line"), reason, row, "an undeclared label")
    named = pa.array([known.get(label) for label in labels], pa.string())
    batch = batch.set_column(batch.schema.get_field_index("label"), "label", named)
    return batch.filter(pa.array(good, pa.bool_()))


def _class_names(ids: pa.Array, label: ClassLabel) -> pa.Array:
    # The Hub marks a row without a label by -1.
    return pa.array(label.names, pa.string()).take(pc.if_else(pc.less(ids, 0), None, ids))
