"""Store the splits of a run, and choose the rows of an epoch: some are held out, others come several times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import VALIDATION_SHARE
from indictune.config.plan import RunPlan
from indictune.console_text import table
from indictune.data.cache import StoredRows, build_with_facts, map_table, repeated_batches, text_keys, write_table
from indictune.data.health.findings import Finding, Found, warning_notes
from indictune.data.labels import AnyRows, has_classes, label_lists
from indictune.data.read.row_sources import Source, TrainFiles, entry_numbers

logger = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """How languages are balanced.

    A language with n rows gets a share of an epoch in proportion to n ** alpha: 1 changes nothing; 0 gives each the
    same share. The seed draws the rows that come once more than others, or not at all.
    """

    alpha: float
    seed: int

    def apply(self, folder: Path, entries: Sequence[TrainFiles], keeps_labels: bool) -> list[list[str]]:
        """Write the training rows in `train.arrow` of a folder again, each as often as it comes in an epoch.

        `entries` are those of `--train_files`, if any. With `keeps_labels`, one row at least of each `label` stays.
        Returns the rows of a table: file, language, rows, rows in an epoch, and share; none if nothing changes.
        """
        path = folder / "train.arrow"
        rows = map_table(path)
        whole = entries or [TrainFiles("all rows")]
        entry = entry_numbers(rows["line"], whole) if entries else np.zeros(len(rows), np.int64)
        languages = sorted(rows["language"].unique().to_pylist())
        group = entry * len(languages) + _codes(rows["language"])
        present = np.bincount(group, minlength=len(whole) * len(languages))
        wanted = self.wanted(present.reshape(len(whole), -1), [each.weight for each in whole]).ravel()
        if np.array_equal(present, wanted):
            return []
        repeats = _dealt(group, wanted, np.random.default_rng(self.seed))
        if keeps_labels:
            codes = _codes(rows["label"])
            first = np.unique(codes, return_index=True)[1]
            repeats[first[np.bincount(codes, weights=repeats) == 0]] = 1
        write_table(path, rows.schema, repeated_batches(path, repeats))
        after = np.bincount(group, weights=repeats, minlength=len(present)).astype(int)
        mix = []
        for number in np.flatnonzero(present).tolist():
            entry_number, language_number = divmod(number, len(languages))
            names = whole[entry_number].path, languages[language_number]
            mix.append([*names, f"{present[number]:,}", f"{after[number]:,}", f"{after[number] / after.sum():.1%}"])
        return mix

    def wanted(self, present: Counts, weights: Sequence[float]) -> Counts:
        """Rows of an epoch, int64 [entries, languages], of those present; the weights are those of the entries.

        Languages only share out the rows that the weights give: their sum stays, but for rounding.
        """
        weighted = present * np.asarray(weights)[:, None]
        by_language = weighted.sum(0)
        powers = np.where(by_language > 0, by_language**self.alpha, 0)
        target = powers / powers.sum() * by_language.sum()
        rows: Counts = np.rint(weighted * target / np.maximum(by_language, 1e-9)).astype(np.int64)
        return rows


def mixture_of(plan: RunPlan[Any, Any]) -> Mixture | None:
    """The mixture of a run; None if its rows stay as they are."""
    training = plan.training
    if plan.data.language_sampling_alpha == 1 and not plan.data.train_files:
        return None
    seed = training.seed if training.data_seed is None else training.data_seed
    return Mixture(plan.data.language_sampling_alpha, seed)


def _dealt(group: Counts, wanted: Counts, generator: np.random.Generator) -> Counts:
    """How often each row comes. Those of a group come equally often, and drawn ones once more, as the group wants."""
    repeats = np.zeros(len(group), np.int64)
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=len(wanted)))
    for number, members in enumerate(np.split(order, ends[:-1])):
        if len(members):
            repeats[members], more = divmod(int(wanted[number]), len(members))
            repeats[generator.permutation(members)[:more]] += 1
    return repeats


@dataclass(frozen=True)
class ValidationSplit:
    """Which share of the training rows, above 0 and below 1, is held out; another seed holds out others."""

    share: float
    seed: int

    def choose(
        self, texts: Iterable[str], strata: pa.Array | pa.ChunkedArray, labels: pa.ListArray | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which rows are held out, bool [rows]; the choice depends on the rows alone, not on their order.

        Rows with one text stay together. A text with more rows than half of the share is trained on. So is one text of
        each label: without it, the model would not know the label. Rows of one stratum are held out in proportion.
        `labels` are a list of strings for each row; None if rows have none.
        """
        keys = text_keys(texts, str(self.seed))
        _, first, text_of, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        wanted = round(self.share * len(keys))
        may_go = counts <= max(1, wanted / 2)
        if labels is not None:
            label_of = _codes(labels.flatten())
            kept = np.full(label_of.max(initial=-1) + 1, len(first))
            np.minimum.at(kept, label_of, text_of[labels.value_parent_indices().to_numpy()])
            may_go[kept] = False
        # Keys are hashes: texts in the order of their keys are shuffled.
        ordered = np.argsort(_codes(strata)[first], kind="stable")
        ordered = ordered[may_go[ordered]]
        rate = wanted / max(wanted, counts[ordered].sum(), 1)
        passed = np.floor(np.arange(len(ordered) + 1) * rate + 0.5)
        is_chosen = np.zeros(len(first), np.bool_)
        is_chosen[ordered] = np.diff(passed) > 0
        return is_chosen[text_of]

    def divide(self, train: AnyRows, folder: Path, problem_type: str | None) -> dict[str, AnyRows]:
        """`train`, and `validation` if any row is held out; the folder gets their tables."""
        path, other = folder / "train.arrow", folder / "validation.arrow"
        strata, labels = train.table["language"], None
        if has_classes(train.table, problem_type):
            strata = pc.binary_join_element_wise(train.table["language"], train.table["label"], "\x00")
            labels = label_lists(train.table["label"], problem_type)
        chosen = self.choose(train.texts, strata, labels)
        if not chosen.any():
            return {"train": train}
        write_table(other, train.table.schema, repeated_batches(path, chosen))
        write_table(path, train.table.schema, repeated_batches(path, ~chosen))
        return self.divided(train, map_table(path), map_table(other))

    def divided(self, train: AnyRows, left: pa.Table, held_out: pa.Table) -> dict[str, AnyRows]:
        """The rows of both splits, given by their tables; those held out are named after this flag."""
        origin = f"--validation_split {self.share:g}"
        return {"train": replace(train, table=left), "validation": replace(train, table=held_out, origin=origin)}

    def announce(self, rows: Mapping[str, StoredRows]) -> None:
        """Tell the user how many rows are held out of the splits, in one line."""
        if "validation" in rows:
            held_out = len(rows["validation"])
            shown = f"{held_out:,} of {held_out + len(rows['train']):,} rows are held out to evaluate on"
            logger.info("no --validation_file: %s (--validation_split %g)", shown, self.share)


def split_of(plan: RunPlan[Any, Any]) -> ValidationSplit | None:
    """The split of a run; None if it has a validation file, or asks for none."""
    share, training = plan.configuration.get("validation_split"), plan.training  # an evaluation has no such flag
    if not share or plan.data.validation_file is not None:
        return None
    return ValidationSplit(share, training.seed if training.data_seed is None else training.data_seed)


@dataclass(frozen=True)
class Splits(Generic[AnyRows]):
    """All rows of a run.

    Attributes:
        rows: by split, of `train`, `validation` and `test`.
        folder: holds the tables as `<split>.arrow`; its name changes with everything that the rows depend on.
        notes: sentences for the user, such as dropped rows, or rows in more than one split.
        findings: in the rows as they were read, before some were held out or repeated.
        labels: names of the training rows' labels, in the order of their class ids: see `checked_labels`.
    """

    rows: Mapping[str, AnyRows]
    folder: Path
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def stored_splits(
    kind: str,
    rows_type: type[AnyRows],
    sources: Mapping[str, Source[Any]],
    settings: Sequence[object],
    read: Callable[[Path, Found], dict[str, AnyRows]],
    split: ValidationSplit | None,
    mixture: Mixture | None,
    problem_type: str | None = None,
) -> Splits[AnyRows]:
    """The splits of a run, from the cache if they were read before.

    Args:
        settings: all that `read` depends on but for the sources.
        read: writes the tables of all splits to a folder, and adds what it finds in the rows.
        split: holds out training rows, unless the sources have validation rows; `mixture` repeats and drops some.
    """
    ignored = []
    if split is not None and "validation" in sources:
        if split.share != VALIDATION_SHARE:
            origin = sources["validation"].origin
            ignored = [f"Ignoring --validation_split {split.share:g}: {origin} has validation rows."]
        split = None

    def make(folder: Path) -> dict[str, Any]:
        found = Found()
        rows = read(folder, found)
        if split is not None and "train" in rows:
            rows |= split.divide(rows["train"], folder, problem_type)
        mix = []
        if mixture is not None:
            keeps_labels = has_classes(rows["train"].table, problem_type)
            mix = mixture.apply(folder, sources["train"].entries, keeps_labels)
        found.notes += warning_notes(found.findings)
        of_splits = {name: (each.source, each.origin, each.files) for name, each in rows.items()}
        return {"splits": of_splits, "mix": mix, **asdict(found)}

    made_from = [[name, source.name, source.origin, source.fingerprint] for name, source in sources.items()]
    choices = [None if each is None else vars(each) for each in (split, mixture)]
    folder, facts = build_with_facts(kind, [made_from, problem_type, *settings, *choices], f"The {kind}", make)
    rows = {name: rows_type(map_table(folder / f"{name}.arrow"), *each) for name, each in facts["splits"].items()}
    if split is not None:
        split.announce(rows)
    if mix := facts["mix"]:
        for line in table(["mix of an epoch", "language", "rows", "in an epoch", "share"], mix).split("\n"):
            logger.info(line)
    findings = [Finding(**each) for each in facts["findings"]]
    return Splits(rows, folder, [*facts["notes"], *ignored], findings, facts["labels"])


def _codes(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The rank of each string among all, in alphabetical order, int64 [values]."""
    distinct = values.unique().sort()
    return np.asarray(pc.index_in(values, value_set=distinct)).astype(np.int64)
