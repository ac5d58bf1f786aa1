"""Find texts that have one label in one row and another label in another row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import shortened
from indictune.data.rows import Column, StoredRows, text_keys
from indictune.data.targets import MULTI_LABEL, REGRESSION, parts


def contradictions(splits: Mapping[str, StoredRows], problem_type: str | None) -> list[str]:
    """A sentence about texts with several labels, in one split or over several; none if there are none.

    Args:
        splits: by name; each has columns `text` and `label`.
        problem_type: of the run. Scores of a regression may differ.
    """
    if problem_type == REGRESSION:
        return []
    rows = list(splits.values())
    keys = np.concatenate([text_keys(Column(each.table["text"])) for each in rows])
    codes = _codes([each.table["label"] for each in rows], problem_type)
    split_of_row = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    order = np.lexsort((codes, keys))
    first, second = order[:-1], order[1:]
    is_same_text = keys[first] == keys[second]
    differs = is_same_text & (codes[first] != codes[second])
    texts = np.unique(keys[first[differs]])
    if not len(texts):
        return []
    in_several = np.isin(texts, keys[first[is_same_text & (split_of_row[first] != split_of_row[second])]]).sum()
    pair = min(zip(first[differs].tolist(), second[differs].tolist(), strict=True))
    shown = " and ".join(_shown(rows, number) for number in sorted(pair))
    over_splits = f", {in_several:,} of them over several splits" if in_several else ""
    return [f"{len(texts):,} texts have several labels{over_splits}, such as {shown}."]


def _codes(labels: Sequence[pa.ChunkedArray], problem_type: str | None) -> npt.NDArray[np.int64]:
    """A number for each row, equal where the labels are."""
    of_all = pa.chunked_array([chunk for column in labels for chunk in column.chunks], pa.string())
    written = of_all.unique()
    names = [" ".join(sorted(parts(each))) if problem_type == MULTI_LABEL else each for each in written.to_pylist()]
    code_of = {name: code for code, name in enumerate(names)}
    codes = np.array([code_of[name] for name in names], np.int64)
    places: npt.NDArray[np.int64] = pc.index_in(of_all, value_set=written).to_numpy()
    return codes[places]


def _shown(splits: Sequence[StoredRows], number: int) -> str:
    """Where a row of all splits, counted through, stands, with its label."""
    for rows in splits:
        if number < len(rows):
            break
        number -= len(rows)
    return f"{rows.location(number)} ({shortened(rows.table['label'][number].as_py())})"
