"""Rows of a dataset on the Hub, or of a folder laid out like one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import check_columns, text_batch
from indictune.data.reading import Record
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import ClassLabel, Dataset

_CHUNK_ROWS = 20_000


def load_hub_dataset(name: str, config: str | None) -> Mapping[str, Dataset]:
    """The splits of a dataset by name, from the cache where it is there.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    origin = f"--dataset_name {name}"
    try:
        _check_files(name, datasets.load_dataset_builder(name, config).config.data_files or {})
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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{origin}: cannot be loaded: {reason} (--dataset_config_name names a configuration)"
        ) from error
    if "train" not in found:
        raise UserError(f"{origin}: no split called train; it has {', '.join(map(str, found))}.")
    return dict(found)


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


def fingerprint_of(rows: Dataset) -> str:
    """The name that `datasets` gives the content of a split: of its files, their commit and how they are read."""
    return str(rows._fingerprint)


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


def _class_names(ids: pa.Array, label: ClassLabel) -> pa.Array:
    # The Hub marks a row without a label by -1.
    return pa.array(label.names, pa.string()).take(pc.if_else(pc.less(ids, 0), None, ids))
