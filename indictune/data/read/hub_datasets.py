"""Find the splits of a dataset on the Hub or of a folder with its layout, and read their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from indictune.data.bad_rows import BadRows
from indictune.data.columns import Wanted, check_schema, existing_columns, numbered_rows, text_batches
from indictune.data.read.arrow_files import arrow_errors, with_class_names
from indictune.data.read.delimited import DELIMITERS
from indictune.data.read.open_files import saved_splits
from indictune.data.read.read_files import CHUNK_ROWS, Record, SplitFiles
from indictune.errors import UserError
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, Features

_FLAG = "--dataset_name"
_EXTENSIONS = {"csv": (".csv", ".tsv"), "json": (".json", ".jsonl", ".ndjson")}  # by the builder's name
# Settings of `datasets` that change no value.
_HARMLESS = ("name", "version", "description", "data_dir", "data_files", "features", "sep", "chunksize")


@dataclass(frozen=True)
class HubSplit:
    """A split that `datasets` reads; the same as `SplitFiles` in all that is public."""

    rows: Dataset
    files: tuple[str, ...] = ()

    @property
    def split(self) -> str:
        """Its name in the dataset."""
        return str(self.rows.split)

    @property
    def fingerprint(self) -> str:
        """Digest of the content."""
        return digest_of_split(self.rows)

    def batches(self, wanted: Wanted, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """The rows in the form of `read_batches`; class ids become the names that the dataset declares.

        Raises:
            UserError: there are no rows, a column is missing or holds neither text, numbers nor booleans.
        """
        present = existing_columns(self.split, self.rows.column_names, wanted)
        stored = _arrow_batches(self.rows.select_columns(list(dict.fromkeys(present.values()))))
        texts = text_batches(stored, present, wanted, self.split)
        return with_class_names(texts, wanted.roles, _declared(self.rows.features), self.split, bad)

    def records(self, bad: BadRows) -> Iterator[Record]:
        """The rows in the form of `read_records`."""
        check_schema(self.split, self.rows.features.arrow_schema)
        with arrow_errors(self.split):
            yield from numbered_rows(_arrow_batches(self.rows))


SplitRows = SplitFiles | HubSplit


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
        if of_files:
            found = _splits_of_files(builder, name)
        else:
            found = {str(split): HubSplit(rows) for split, rows in datasets.load_dataset(name, config).items()}
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


def _arrow_batches(rows: Dataset) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.combine_chunks().to_batches()
