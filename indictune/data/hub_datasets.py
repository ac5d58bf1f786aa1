"""Find the splits of a dataset on the Hub, or of a folder with the layout of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from indictune.data.cache import file_digest
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON_EXTENSIONS = (".json", ".jsonl", ".ndjson")
# Settings for reading csv files that change no cell.
_HARMLESS = {"sep", "chunksize"}
# Settings for reading json files that change values.
_JSON_SETTINGS = ("encoding", "encoding_errors", "field")
_WAY_OUT = {
    "csv": "Download the files, write them as csv in UTF-8 with one header line, and give them by --train_file FILE.",
    "json": "Download the files, write them as jsonl in UTF-8, and give them by --train_file FILE.",
}


@dataclass(frozen=True)
class SplitFiles:
    """A split of csv or json files, which we read, because `datasets` 5 changes what they hold.

    For csv files it calls pandas. Pandas takes the first field for an index where rows have more fields than the
    header, and "NA" and "None" for missing texts. Where one json row of thousands has a number or a list for a text,
    `datasets` writes all texts of the column as JSON, in quotes. It writes 1e5 as 100000, and silently drops one of
    two equal keys.

    Attributes:
        split: its name.
        kind: of the files; tsv counts as csv.
        files: on this machine, at least one.
        class_names: column -> names of the classes 0, 1, ..., as the dataset's README.md declares them.
    """

    split: str
    kind: Literal["csv", "json"]
    files: tuple[str, ...]
    class_names: Mapping[str, Sequence[str]]


SplitRows: TypeAlias = "Dataset | SplitFiles"


def load_hub_dataset(name: str, config: str | None, is_read: bool = True) -> Mapping[str, Dataset | SplitFiles]:
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

    flag = "--dataset_name"
    found: Mapping[str, Dataset | SplitFiles]
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        if not is_read:
            return {}
        found = _splits_of_files(builder, name) if builder.name in _WAY_OUT else datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError("dataset-missing", flag, name) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError("dataset-unreachable", flag, name) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of "An error occurred while generating the dataset"
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise UserError("dataset-unreadable", flag, name, reason=reason) from error
    if "train" not in found:
        raise UserError("train-split-missing", flag, name, splits=", ".join(map(str, found)))
    made_of = builder.info.builder_name
    if made_of in _WAY_OUT and made_of != builder.name:
        raise UserError("dataset-converted", flag, name, kind=made_of)
    return dict(found)


def _splits_of_files(builder: DatasetBuilder, name: str) -> dict[str, SplitFiles]:
    """The splits of a dataset of csv or json files, downloaded unless they are on this machine.

    Raises:
        UserError: it has files of another kind, or its README.md declares settings that change what they hold.
    """
    import datasets

    kind, config = builder.name, builder.config
    if changed := _changed_settings(config):
        settings = ", ".join(changed)
        raise UserError("dataset-settings", "--dataset_name", name, _WAY_OUT[kind], settings=settings, kind=kind)
    extensions = (
        [each for each, sep in _SEPARATORS.items() if sep == config.sep] if kind == "csv" else _JSON_EXTENSIONS
    )
    for file in (file for of_split in config.data_files.values() for file in of_split):
        if Path(file).suffix.lower() not in extensions:
            details: dict[str, Any] = {"file": file, "expected": ", ".join(extensions)}
            raise UserError("dataset-file-kind", "--dataset_name", name, _WAY_OUT[kind], **details)
    features = builder.info.features or {}
    class_names = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    files = datasets.DownloadManager().download(config.data_files)
    return {
        str(split): SplitFiles(str(split), kind, tuple(of_split), class_names) for split, of_split in files.items()
    }


def _changed_settings(config: Any) -> list[str]:
    """Settings of the dataset's README.md that change what its files hold."""
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    if isinstance(config, CsvConfig):
        plain = CsvConfig().pd_read_csv_kwargs
        given = config.pd_read_csv_kwargs.items()
        return sorted(name for name, value in given if name not in _HARMLESS and value != plain[name])
    return [name for name in _JSON_SETTINGS if getattr(config, name) != getattr(JsonConfig(), name)]


def _check_files(name: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse a dataset whose README.md names files outside it. `datasets` 5 reads them, wherever they are.

    Args:
        name: of the dataset, or its folder.
        files: of each split: paths, or `hf://datasets/OWNER/NAME@COMMIT/PATH`.
    """
    folder = Path(name).resolve()
    outside = [
        file
        for file in dict.fromkeys(file for of_split in files.values() for file in of_split)
        if not (Path(file).resolve().is_relative_to(folder) if folder.is_dir() else _is_of_dataset(file, name))
    ]
    if outside:
        raise UserError("dataset-files-outside", "--dataset_name", name, files=", ".join(map(repr, outside[:3])))


def _is_of_dataset(file: str, name: str) -> bool:
    return file.startswith(f"hf://datasets/{name}@") and ".." not in PurePosixPath(file).parts


def fingerprint_of(rows: Dataset | SplitFiles) -> str:
    """Of the content of a split. `datasets` computes it from the files, their commit and how they are read."""
    if isinstance(rows, SplitFiles):
        return repr([rows.class_names, *((file, file_digest(file)) for file in rows.files)])
    return str(rows._fingerprint)


def name_of(split: str, rows: Dataset | SplitFiles) -> str:
    """A split as messages name it: by its file, if it is one."""
    return rows.files[0] if isinstance(rows, SplitFiles) and len(rows.files) == 1 else split
