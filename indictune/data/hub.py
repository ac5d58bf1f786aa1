"""Rows of a dataset on the Hub, or of a folder laid out like one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import check_columns, text_table
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def load_hub_dataset(name: str, config: str | None) -> Mapping[str, Dataset]:
    """The splits of a dataset by name, from the cache where it is there.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    origin = f"--dataset_name {name}"
    try:
        found = datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"{origin}: no such dataset on the Hub, or it is private (then log in with `hf auth login`); "
            "rows on this machine are given as --train_file FILE."
        ) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError(
            f"{origin}: the Hub cannot be reached and the dataset is not in the cache; "
            "give --train_file FILE, or --dataset_name builtin:tweets, which needs no network."
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{origin}: cannot be loaded: {reason} (--dataset_config_name names a configuration)"
        ) from error
    if "train" not in found:
        raise UserError(f"{origin}: no split called train; it has {', '.join(map(str, found))}.")
    return dict(found)


def hub_table(rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str]) -> pa.Table:
    """The rows of a split in the form of `read_table`; class ids become the names that the dataset gives them.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    import datasets

    split = str(rows.split)
    check_columns(split, rows.column_names, columns)
    if not len(rows):
        raise UserError(f"{split}: the split holds no rows.")
    names = {**columns, **{role: name for role, name in optional.items() if name in rows.column_names}}
    table = rows.select_columns(list(dict.fromkeys(names.values()))).with_format("arrow")[:]
    label = names["label"]
    feature = rows.features[label]
    if isinstance(feature, datasets.ClassLabel):
        # The Hub marks a row without a label by -1.
        ids = pc.if_else(pc.less(table[label], 0), None, table[label]).combine_chunks()
        class_names = pa.array(feature.names, pa.string()).take(ids)
        table = table.set_column(table.column_names.index(label), label, class_names)
    return text_table(table, names, list(optional), split)
