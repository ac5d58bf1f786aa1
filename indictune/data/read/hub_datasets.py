"""Find the splits of a dataset by name or folder, of one commit, and read parts of them one after the other."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from indictune.data.bad_rows import BadRows, Batches, Record
from indictune.data.cache import build_with_facts
from indictune.data.columns import Wanted, existing_columns
from indictune.data.read.arrow_files import Classes, arrow_errors, named_batches, named_records
from indictune.data.read.delimited import DELIMITERS
from indictune.data.read.open_files import saved_splits
from indictune.data.read.read_files import CHUNK_ROWS, SplitFiles
from indictune.errors import UserError
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, Features

logger = logging.getLogger(__name__)

CONVERTED = "refs/convert/parquet"  # what the Hub made of the files of a dataset, of those with a script too
_DATASET, _CONFIG, _REVISION = "--dataset_name", "--dataset_config_name", "--dataset_revision"
_EXTENSIONS = {"csv": (".csv", ".tsv"), "json": (".json", ".jsonl", ".ndjson")}  # by the builder's name
# Settings of `datasets` that change no value.
_HARMLESS = ("name", "version", "description", "data_dir", "data_files", "features", "sep", "chunksize")
_OF_CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<partial>partial-)?(?P<split>[^/]+)/\d{4}\.parquet")


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

    def batches(self, wanted: Wanted, bad: BadRows) -> Batches:
        """The rows in the form of `read_batches`; class ids become the names that the dataset declares.

        Raises `UserError` if there are no rows, or a column is missing or holds neither text, numbers nor booleans.
        """
        present = existing_columns(self.split, self.rows.column_names, wanted)
        stored = _arrow_batches(self.rows.select_columns(list(dict.fromkeys(present.values()))))
        return named_batches(self.split, self.rows.features.arrow_schema, stored, present, wanted, bad)

    def records(self, bad: BadRows) -> Iterator[Record]:
        """The rows in the form of `read_records`; class ids become names, in lists too."""
        with arrow_errors(self.split):
            yield from named_records(self.split, self.rows.features.arrow_schema, _arrow_batches(self.rows))


def _arrow_batches(rows: Dataset) -> Batches:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.combine_chunks().to_batches()


def _declared(features: Features | Mapping[str, Any]) -> Classes:
    import datasets

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def load_hub_dataset(
    name: str, config: str | None, revision: str | None = None, is_read: bool = True
) -> Mapping[str, SplitFiles | HubSplit]:
    """The splits of a dataset by name or folder, from the cache if it is there.

    Without `is_read`, it only checks that the dataset exists: nothing is downloaded, no splits are returned. Raises
    `UserError` if there is no such dataset or configuration, the network does not reach it, or nobody can read it.
    """
    import datasets

    if saved := saved_splits(name):
        return {split: SplitFiles(files, split) for split, files in saved.items()}
    with _explained(name, config, revision):
        if commit := commit_read(name, revision):
            return _at_commit(name, config, commit, is_read)
        if revision is not None:
            raise UserError("no-effect", _REVISION, revision, other=f"{_DATASET} {name}")
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        if not is_read:
            return {}
        _check_settings(builder, name)
        if builder.name in _EXTENSIONS:
            return _split_files(builder.config.data_files, _declared(builder.info.features or {}))
        return {str(split): HubSplit(rows) for split, rows in datasets.load_dataset(name, config).items()}


@contextmanager
def _explained(name: str, config: str | None, revision: str | None) -> Iterator[None]:
    """Turn what `datasets` and huggingface_hub raise in the block into a `UserError`."""
    import datasets
    from huggingface_hub import constants, errors

    errors_offline = errors.RevisionResolutionError, errors.LocalEntryNotFoundError
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise UserError("dataset-revision-missing", _REVISION, revision, name=name) from error
    except (datasets.exceptions.DatasetNotFoundError, errors.RepositoryNotFoundError) as error:
        if isinstance(error, errors.GatedRepoError) or "a gated dataset" in str(error):
            raise UserError("dataset-gated", _DATASET, name, page=f"{constants.ENDPOINT}/datasets/{name}") from error
        raise UserError("dataset-missing", _DATASET, name) from error
    except (ConnectionError, errors.HfHubHTTPError, *errors_offline) as error:
        raise UserError("dataset-unreachable", _DATASET, name) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of "An error occurred while generating the dataset"
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        if known := re.search(r"(?:Available|available configs): (?P<names>\[.*\])", " ".join(str(cause).split())):
            details = {"name": name, "known": known["names"][1:-1]}
            raise UserError("dataset-config-unknown", _CONFIG, config or "", **details) from error
        raise UserError("dataset-unreadable", _DATASET, name, reason=reason) from error


@functools.cache
def commit_read(name: str, revision: str | None) -> str | None:
    """The commit whose files are read, the same for this process throughout; offline the one that the cache knows.

    Of a dataset whose rows come from a script, it is that of what the Hub made of them. A folder has none.
    """
    if Path(name).exists():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    commit = HfApi().resolve_revision(name, repo_type="dataset", revision=revision).resolved
    script = f"{name.rpartition('/')[2]}.py"
    if script not in _files_of(name, commit):
        return commit
    details = {"script": script, "ref": CONVERTED}
    if revision is not None:
        raise UserError("dataset-script", _DATASET, name, **details)
    try:
        converted = HfApi().resolve_revision(name, repo_type="dataset", revision=CONVERTED).resolved
    except RevisionNotFoundError as error:
        raise UserError("dataset-script", _DATASET, name, **details) from error
    say = "%s %s: its script %s is not run. Reading what the Hub made of its rows: %s %s, commit %s."
    logger.warning(say, _DATASET, name, script, _REVISION, CONVERTED, converted)
    return converted


def _files_of(name: str, commit: str) -> list[str]:
    """The names of all files of a commit, from the cache if they are there."""

    def make(_: Path) -> dict[str, list[str]]:
        from huggingface_hub import HfApi

        return {"files": HfApi().list_repo_files(name, repo_type="dataset", revision=commit)}

    return list(build_with_facts("dataset", [name, commit], f"The list of files of {name}", make)[1]["files"])


def _at_commit(name: str, config: str | None, commit: str, is_read: bool) -> Mapping[str, SplitFiles | HubSplit]:
    """The splits of a dataset of the Hub, from the files of one commit."""
    import datasets
    from huggingface_hub import hf_hub_download

    listing = _listing(name, config, commit)
    if not is_read:
        return {}
    paths = {
        split: [hf_hub_download(name, file, repo_type="dataset", revision=commit) for file in files]
        for split, files in listing["splits"].items()
    }
    features = datasets.Features.from_dict(listing["features"] or {})
    if listing["kind"] in _EXTENSIONS:
        return _split_files(paths, _declared(features))
    made = datasets.load_dataset(listing["kind"], data_files=paths, features=features or None)
    return {str(split): HubSplit(rows) for split, rows in made.items()}


def _listing(name: str, config: str | None, commit: str) -> dict[str, Any]:
    """What a configuration is at a commit, from the cache if it is there: `kind`, `splits` and `features`.

    `kind` is the builder of `datasets`, `splits` the files of each split, and `features` what README.md declares.
    """

    def make(_: Path) -> dict[str, Any]:
        import datasets

        names = _files_of(name, commit)
        if "README.md" not in names and (splits := _splits_of_converted(name, config, names)):
            return {"kind": "parquet", "splits": splits, "features": None}
        builder = datasets.load_dataset_builder(name, config, revision=commit)
        files = builder.config.data_files
        if files is None:  # `datasets` takes whatever commit it has kept where the Hub does not answer
            raise ConnectionError
        _check_files(name, files)
        _check_settings(builder, name)
        begin, features = f"hf://datasets/{name}@{commit}/", builder.info.features
        splits = {str(split): [each.removeprefix(begin) for each in of_split] for split, of_split in files.items()}
        return {"kind": builder.name, "splits": splits, "features": features and features.to_dict()}

    parts = [name, commit, config]
    return dict(build_with_facts("dataset", parts, f"The configuration {config} of {name}", make)[1])


def _splits_of_converted(name: str, config: str | None, files: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split in `CONVERTED`; empty if the files are others."""
    matches = [match for file in files if (match := _OF_CONVERTED.fullmatch(file))]
    configs = dict.fromkeys(match["config"] for match in matches)
    chosen = next(iter(configs)) if config is None and len(configs) == 1 else config
    if configs and chosen not in configs:
        raise UserError("dataset-config-unknown", _CONFIG, config or "", name=name, known=", ".join(configs))
    splits = dict[str, list[str]]()
    for match in (match for match in matches if match["config"] == chosen):
        splits.setdefault(match["split"], []).append(match[0])
        if match["partial"]:
            logger.warning("%s %s: the Hub converted only a part of its rows (%s).", _DATASET, name, match[0])
    return splits


def _split_files(files: Mapping[Any, Iterable[str]], declared: Classes) -> dict[str, SplitFiles | HubSplit]:
    return {str(split): SplitFiles(tuple(of_split), str(split), declared) for split, of_split in files.items()}


def _check_settings(builder: DatasetBuilder, name: str) -> None:
    """Refuse csv and json files that are packed or named otherwise, and settings that change what they hold."""
    kind, config = builder.name, builder.config
    if kind not in _EXTENSIONS:
        return
    plain, names = type(config)(), [each.name for each in fields(config) if each.name not in _HARMLESS]
    if changed := sorted(each for each in names if getattr(config, each) != getattr(plain, each)):
        raise UserError("dataset-settings", _DATASET, name, settings=", ".join(changed), kind=kind)
    for file in (file for of_split in config.data_files.values() for file in of_split):
        extension = Path(file).suffix.lower()
        if extension not in _EXTENSIONS[kind] or (kind == "csv" and DELIMITERS[extension] != config.sep):
            raise UserError("dataset-file-kind", _DATASET, name, file=file, expected=", ".join(_EXTENSIONS[kind]))


def _check_files(name: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse a dataset whose README.md names files outside it. `datasets` 5 reads them, wherever they are.

    The files of each split are paths, or `hf://datasets/OWNER/NAME@COMMIT/PATH`.
    """
    folder = Path(name).resolve()
    named = dict.fromkeys(chain.from_iterable(files.values()))
    if folder.is_dir():
        outside = [file for file in named if not Path(file).resolve().is_relative_to(folder)]
    else:
        begin = f"hf://datasets/{name}@"
        outside = [file for file in named if not file.startswith(begin) or ".." in PurePosixPath(file).parts]
    if outside:
        raise UserError("dataset-files-outside", _DATASET, name, files=", ".join(map(repr, outside[:3])))
