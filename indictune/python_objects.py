"""Hand tables, metrics and callbacks of a Python program to a run: the run reads them from files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from indictune.config.command_line import OBJECTS_FILE
from indictune.errors import UserError
from indictune.files import cache_folder, kept_in
from indictune.upstream import without_bars_of_rows

if TYPE_CHECKING:
    import pyarrow as pa

FUNCTION = "python:"  # begins the name of a metric that is a function of that program
_EXPECTED = "expected a file, a table of pandas, polars or arrow, a Dataset, or a list of dictionaries"
_SPLITS = {"train": "train_file", "validation": "validation_file", "test": "test_file"}


def has_columns(value: object) -> bool:
    """Whether a value is a table, and no sequence of texts."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    return type(value).__name__ in ("DataFrame", "Table", "RecordBatch", "Dataset")


def tables_as_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flags, where tables are replaced by files of the cache that hold their rows.

    A `DatasetDict` of `train_file` gives `validation_file` and `test_file` too, where these are not given.
    """
    found = dict(values)
    for name, value in values.items():
        if name == "train_file" and isinstance(value, Mapping):  # as a DatasetDict is
            splits = {_SPLITS[split]: rows for split, rows in value.items() if split in _SPLITS}
            if "train_file" not in splits:
                raise UserError("wrong-type", name, ", ".join(map(str, value)), reason="expected a split `train`")
            found |= {
                flag: rows_file(rows, flag) for flag, rows in splits.items() if flag == name or flag not in values
            }
        elif name.endswith("_file") and not isinstance(value, str | os.PathLike | None):
            found[name] = rows_file(value, name)
    return found


def check_columns(rows: Any, flag: str, name_of: Callable[[str], str]) -> None:
    """Refuse a table two of whose columns would have one name (`column-duplicate`), as renamed by `name_of`."""
    own = rows[0] if isinstance(rows, list | tuple) else getattr(rows, "column_names", None) or rows.columns
    counts = Counter(name_of(str(name)) for name in own)
    for name, count in counts.items():
        if count > 1:
            raise UserError("column-duplicate", flag, type(rows).__name__, count=count, column=name)


def rows_file(rows: Any, flag: str) -> str:
    """The path of a file in the cache with the rows of a table; equal rows have one file. Raises as `write_rows`."""
    folder = cache_folder() / "tables"
    with kept_in(folder, "The rows"), TemporaryDirectory() as work:
        written = write_rows(rows, flag, Path(work))
        with written.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        kept = folder / f"{digest}{written.suffix}"
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f".{kept.name}.{os.getpid()}"
            shutil.copyfile(written, unfinished)
            unfinished.replace(kept)
    return str(kept)


def write_rows(rows: Any, flag: str, folder: Path) -> Path:
    """Write the rows of a table as parquet, or of dictionaries as json lines.

    Raises:
        UserError: `wrong-type` for what is no table, or has columns of several types.
    """
    if not has_columns(rows):
        raise UserError("wrong-type", flag, type(rows).__name__, reason=_EXPECTED)
    is_list = isinstance(rows, list | tuple)
    path = folder / f"rows.{'jsonl' if is_list else 'parquet'}"
    try:
        if is_list:
            lines = (json.dumps(_plain(row), ensure_ascii=False) for row in rows)
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            _write_table(rows, path)
    except (TypeError, ValueError, NotImplementedError) as error:  # pyarrow's are of these
        reason = f"{_EXPECTED} ({str(error).splitlines()[0]})"
        raise UserError("wrong-type", flag, type(rows).__name__, reason=reason) from error
    return path


def _library(rows: Any) -> str:
    return type(rows).__module__.partition(".")[0]


def _write_table(rows: Any, path: Path) -> None:
    if _library(rows) == "datasets" and type(rows).__name__ == "Dataset":
        with without_bars_of_rows():
            rows.to_parquet(path)  # with the names of its classes
        return
    if _library(rows) == "polars":
        rows.write_parquet(path)
        return
    import pyarrow as pa  # slow
    import pyarrow.parquet as pq

    is_of_pandas = _library(rows) == "pandas"
    pq.write_table(pa.Table.from_pandas(rows, preserve_index=False) if is_of_pandas else pa.table(rows), path)


def with_columns(rows: Any, more: pa.Table, name_of: Callable[[str], str]) -> Any:
    """A table of the kind of `rows` with further columns; `name_of` renames its own, which may have their names."""
    if isinstance(rows, list | tuple):
        renamed = ({name_of(str(name)): value for name, value in row.items()} for row in rows)
        return [row | found for row, found in zip(renamed, more.to_pylist(), strict=True)]
    library = _library(rows)
    if library == "pandas":
        return rows.rename(columns=lambda name: name_of(str(name))).assign(**more.to_pandas().set_index(rows.index))
    if library == "datasets":
        import datasets

        renamed = rows.rename_columns({name: name_of(name) for name in rows.column_names})
        with without_bars_of_rows():
            return datasets.concatenate_datasets([renamed, datasets.Dataset(more)], axis=1)
    import pyarrow as pa  # slow

    own = pa.table(rows)
    own = own.rename_columns([name_of(name) for name in own.schema.names])
    whole = pa.table([*own.columns, *more.columns], [*own.schema.names, *more.schema.names])
    if library != "polars":
        return whole
    import polars

    return polars.from_arrow(whole)


def _plain(value: Any) -> Any:
    """A value as json holds it: numpy's numbers as Python's, and NaN, by which pandas means nothing, as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.tolist() if type(value).__module__ == "numpy" else value


@contextmanager
def functions_file(metrics: Mapping[str, Any], callbacks: Sequence[Any]) -> Iterator[dict[str, str]]:
    """A block for which a file holds these functions; yields the variable of the environment that names it.

    Functions of the program itself are copied by cloudpickle. Those of a module are imported there.

    Raises:
        UserError: `wrong-type` for what cannot be copied.
    """
    if not metrics and not callbacks:
        yield {}
        return
    import cloudpickle

    try:
        content = cloudpickle.dumps({"metrics": dict(metrics), "callbacks": list(callbacks)})
    except Exception as error:  # objects raise any error when they are copied
        flag = "callbacks" if callbacks else "metrics"
        reason = f"it cannot be copied to the process of the run ({error})"
        raise UserError("wrong-type", flag, ", ".join(map(repr, callbacks or metrics)), reason=reason) from error
    with TemporaryDirectory(prefix="indictune-") as folder:
        path = Path(folder, "objects.pkl")
        path.write_bytes(content)
        yield {OBJECTS_FILE: str(path)}


def functions_of_program() -> dict[str, Any]:
    """The `metrics` and `callbacks` that the program which has started this run gave it, or none."""
    if not (path := os.environ.get(OBJECTS_FILE)):
        return {"metrics": {}, "callbacks": []}
    import cloudpickle

    found: dict[str, Any] = cloudpickle.loads(Path(path).read_bytes())
    return found
