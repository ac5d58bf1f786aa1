"""Scores of rows, such as accuracy and F1: of labels, entities, predicted numbers, and answers given or written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from indictune.evaluation.breakdown import MAX_CONFUSED, Group, LabelScores, Scorer
from indictune.evaluation.uncertainty import (
    RESAMPLES,
    Estimate,
    estimate,
    estimates,
    ratio,
    ratio_of_sums,
    resampled_counts,
    resampled_sums,
)
from indictune.upstream import chrf_counts, chrf_of


@dataclass(frozen=True)
class LabelCounts:
    """Of each label, how often it is right, predicted, and both; each [labels], [draws, labels] or [rows, labels]."""

    present: np.ndarray
    predicted: np.ndarray
    hits: np.ndarray

    def scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Precision, recall and F1; a ratio without a denominator is 0."""
        both = self.present + self.predicted
        return ratio(self.hits, self.predicted), ratio(self.hits, self.present), ratio(2 * self.hits, both)

    def macro(self, each: np.ndarray) -> np.ndarray:
        """The mean over the labels that the rows have or that were predicted."""
        counts = self.present + self.predicted > 0
        return ratio((each * counts).sum(-1), counts.sum(-1))

    def micro(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """F1, precision and recall of all labels together."""
        present, predicted, hits = (each.sum(-1) for each in (self.present, self.predicted, self.hits))
        return ratio(2 * hits, present + predicted), ratio(hits, predicted), ratio(hits, present)


def scores_of_labels(counts: LabelCounts, drawn: LabelCounts, labels: Sequence[str]) -> dict[str, LabelScores]:
    """The scores of each label, with intervals from the counts in drawn rows."""
    columns = map(estimates, counts.scores(), drawn.scores())
    support, predicted = counts.present.tolist(), counts.predicted.tolist()
    rows = zip(*columns, support, predicted, strict=True)
    return {label: LabelScores(*row) for label, row in zip(labels, rows, strict=True)}


@dataclass(frozen=True)
class Confusion:
    """Rows of one label each, counted by label and predicted label.

    Cells have their label in `present`, their predicted label in `predicted`, and their rows in `counts`, int [cells].
    """

    present: np.ndarray
    predicted: np.ndarray
    counts: np.ndarray
    num_labels: int

    @classmethod
    def of_rows(cls, references: np.ndarray, predictions: np.ndarray, num_labels: int) -> Confusion:
        """The counts of rows with these class ids, int [rows] each."""
        cells, counts = np.unique(np.asarray(references) * num_labels + predictions, return_counts=True)
        return cls(*np.divmod(cells, num_labels), counts, num_labels)

    def label_counts(self, counts: np.ndarray) -> LabelCounts:
        """Counts of labels from counts of cells, [..., cells]."""
        hits = self.present == self.predicted
        of_hits = self._summed(self.present[hits], counts[..., hits])
        return LabelCounts(self._summed(self.present, counts), self._summed(self.predicted, counts), of_hits)

    def _summed(self, label_of_cell: np.ndarray, counts: np.ndarray) -> np.ndarray:
        summed = np.zeros((*counts.shape[:-1], self.num_labels), np.int64)
        order = np.argsort(label_of_cell, kind="stable")
        labels, starts = np.unique(label_of_cell[order], return_index=True)
        if len(labels):
            summed[..., labels] = np.add.reduceat(counts[..., order], starts, axis=-1)
        return summed

    def macro_f1(self, counts: np.ndarray) -> np.ndarray:
        """The macro-F1 for counts of cells, [..., cells]."""
        of_labels = self.label_counts(counts)
        return of_labels.macro(of_labels.scores()[2])

    def drawn(self, draws: int) -> LabelCounts:
        """Counts of labels in drawn rows, [draws, labels]."""
        parts = [vars(self.label_counts(counts)).values() for counts in resampled_counts(self.counts, draws)]
        return LabelCounts(*map(np.concatenate, zip(*parts, strict=True)))

    def matrix(self) -> list[list[int]] | None:
        """Rows by label and predicted label; None for more than 50 labels."""
        if self.num_labels > MAX_CONFUSED:
            return None
        square = np.zeros((self.num_labels, self.num_labels), np.int64)
        square[self.present, self.predicted] = self.counts
        return square.tolist()


def one_label(references: np.ndarray, predictions: np.ndarray, labels: Sequence[str]) -> Scorer:
    """Scores one label a row: macro-F1, precision, recall, accuracy, and those of each label.

    The macro scores are means over the labels that the rows have or that were predicted. So a label that a language
    never uses does not lower the macro-F1 of that language. A single wrong prediction of it counts as an F1 of 0.
    `references` and `predictions` are class ids, int [rows].
    """
    references, predictions = np.asarray(references), np.asarray(predictions)

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        confusion = Confusion.of_rows(references[rows], predictions[rows], len(labels))
        counts, drawn = confusion.label_counts(confusion.counts), confusion.drawn(draws)
        columns = zip(counts.scores(), drawn.scores(), strict=True)
        precision, recall, f1 = (estimate(float(counts.macro(a)), drawn.macro(b)) for a, b in columns)
        accuracy = estimate(counts.hits.sum() / len(rows), drawn.hits.sum(1) / len(rows))
        scores = {"macro_f1": f1, "macro_precision": precision, "macro_recall": recall, "accuracy": accuracy}
        return Group(len(rows), scores, scores_of_labels(counts, drawn, labels), confusion.matrix())

    return group


def several_labels(predicted: np.ndarray, references: np.ndarray, labels: Sequence[str]) -> Scorer:
    """Scores several labels a row, bool or 0 and 1 [rows, labels]: micro-F1, macro-F1, and those of each label."""

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        given, right = predicted[rows] > 0, references[rows] > 0
        return group_of_counts(LabelCounts(right, given, right & given), labels, ("micro_f1", "macro_f1"), draws)

    return group


def group_of_counts(rows: LabelCounts, labels: Sequence[str], names: tuple[str, str | None], draws: int) -> Group:
    """Scores from the counts of each row; `names` are of the F1 over all counts, and of the mean F1 of labels."""
    parts = vars(rows).values()
    if labels:
        drawn = LabelCounts(*(resampled_sums(list(part.T), draws) for part in parts))
    else:
        drawn = LabelCounts(*(np.zeros((min(draws, 1), 0)),) * 3)
    counts = LabelCounts(*(part.sum(0, dtype=np.int64) for part in parts))
    micro, macro = names
    columns = zip((micro, "precision", "recall"), counts.micro(), drawn.micro(), strict=True)
    scores = {name: estimate(float(value), sample) for name, value, sample in columns}
    if macro is not None:
        scores[macro] = estimate(float(counts.macro(counts.scores()[2])), drawn.macro(drawn.scores()[2]))
    return Group(len(rows.present), scores, scores_of_labels(counts, drawn, labels))


def best_threshold(probabilities: np.ndarray, references: np.ndarray) -> float:
    """The threshold of 0.05, 0.06 .. 0.95 with the best micro-F1; of equal ones the nearest to 0.5.

    `probabilities` are float [rows, labels], `references` 0 or 1 [rows, labels].
    """
    right = references > 0

    def micro_f1(threshold: float) -> float:
        given = probabilities >= threshold
        return float(ratio(2 * (given & right).sum(), given.sum() + right.sum()))

    thresholds = [percent / 100 for percent in range(5, 96)]
    by_distance = sorted(thresholds, key=lambda threshold: abs(threshold - 0.5))
    return max(by_distance, key=micro_f1)


_IGNORED = -100


def entities(
    predictions: np.ndarray,
    references: Sequence[Sequence[int]],
    are_read: Sequence[Sequence[bool]],
    tag_names: Sequence[str],
) -> Scorer:
    """Scores the tags of sentences: F1, precision, recall, those of each kind of entity, and how many words are read.

    Args:
        predictions: int [sentences, tokens]; -100 where a token carries no tag.
        references: of each sentence, the tag of each word, as a number of `tag_names`.
        are_read: of each sentence, whether the model reads each word. A word that was cut off counts as predicted O.
    """
    names = list(map(_seqeval_tag, tag_names))
    predicted = [_entities(row) for row in predicted_tags(predictions, are_read, names)]
    right = [_entities([names[tag] for tag in row]) for row in references]
    kinds = entity_kinds(tag_names)
    hits = [found & given for found, given in zip(predicted, right, strict=True)]
    counts = [_counted(each, kinds) for each in (right, predicted, hits)]
    num_tags = np.array(list(map(sum, are_read)))

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        scored = group_of_counts(LabelCounts(*(each[rows] for each in counts)), kinds, ("f1", None), draws)
        return replace(scored, counts={"num_tags": int(num_tags[rows].sum())})

    return group


def predicted_tags(
    predictions: np.ndarray, are_read: Sequence[Sequence[bool]], names: Sequence[str]
) -> list[list[str]]:
    """The predicted tag of each word, O for one that was cut off; arguments as of `entities`."""
    tags = []
    for row, is_read in zip(predictions, are_read, strict=True):
        found = iter(row[row != _IGNORED])
        tags.append([names[next(found)] if each else "O" for each in is_read])
    return tags


def entity_kinds(tag_names: Sequence[str]) -> list[str]:
    """The kinds of entity that these tags can name, sorted."""
    return sorted({kind for tag in tag_names for kind, *_ in _entities([_seqeval_tag(tag)])})


def _entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first and last word of each entity of a sentence."""
    from seqeval.metrics.sequence_labeling import get_entities  # slow to import

    return set(get_entities(tags))


def _counted(rows: Sequence[set[tuple[str, int, int]]], kinds: Sequence[str]) -> np.ndarray:
    """How many entities of each kind a sentence has, int64 [sentences, kinds]."""
    of_rows = (Counter(kind for kind, *_ in found) for found in rows)
    counts = [[counted[kind] for kind in kinds] for counted in of_rows]
    return np.array(counts, np.int64).reshape(len(rows), len(kinds))


def _seqeval_tag(tag: str) -> str:
    """The tag as seqeval reads it: L- and U- (BILOU) become E- and S-, and a tag without a prefix is an I-."""
    prefix, dash, kind = tag.partition("-")
    prefix = {"L": "E", "U": "S"}.get(prefix, prefix)
    return f"{prefix}{dash}{kind}" if prefix in ("O", "B", "I", "E", "S") else f"I-{tag}"


def numbers(predictions: np.ndarray, references: np.ndarray) -> Scorer:
    """Scores predicted numbers, each [rows]: Pearson, Spearman (0 where one side is constant), mean absolute error.

    The interval of Spearman is that of Bonett and Wright (2000), which needs no resampled ranks.
    """

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        sides = [np.asarray(side, np.float64)[rows] for side in (predictions, references)]
        mae = ratio_of_sums(np.abs(sides[0] - sides[1]), np.ones(len(rows)), draws)
        scores = {"pearson": _pearson(sides[0], sides[1], draws), "spearman": _spearman(sides[0], sides[1], draws)}
        return Group(len(rows), scores | {"mae": mae})

    return group


def _pearson(first: np.ndarray, second: np.ndarray, draws: int) -> Estimate:
    value = _correlation(first, second)
    first, second = first - first.mean(), second - second.mean()
    products = [np.ones(len(first)), first, second, first * first, second * second, first * second]
    total, x, y, xx, yy, xy = resampled_sums(products, draws).T
    below = np.maximum(xx - x * x / total, 0) * np.maximum(yy - y * y / total, 0)
    return estimate(value, ratio(xy - x * y / total, np.sqrt(below)))


def _spearman(first: np.ndarray, second: np.ndarray, draws: int) -> Estimate:
    from scipy.stats import rankdata  # slow to import

    value, rows = _correlation(rankdata(first), rankdata(second)), len(first)
    if not draws:
        return estimate(value, np.zeros(0))
    if rows < 4 or abs(value) >= 1:
        return Estimate(value, value if rows > 3 else -1.0, value if rows > 3 else 1.0)
    spread = NormalDist().inv_cdf(0.975) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    return Estimate(value, math.tanh(math.atanh(value) - spread), math.tanh(math.atanh(value) + spread))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's r from -1 to 1; 0 where one side is constant or has a NaN."""
    if not all(np.ptp(side) > 0 for side in (first, second)):
        return 0.0
    first, second = first - first.mean(), second - second.mean()
    r = ratio((first * second).sum(), math.sqrt((first**2).sum() * (second**2).sum()))
    return float(np.clip(r, -1, 1))


def answers(losses: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> Scorer:
    """Scores answers that were given: loss a token in nats, and the share of tokens predicted right.

    Tokens are summed before anything is divided. So a long answer counts by its length, and the numbers do not depend
    on how rows were put into batches. `losses` are summed cross-entropies in nats, `tokens` how many tokens count, and
    `right` how many are predicted right, each [rows].
    """

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        loss, count, hits = (each[rows].astype(np.float64) for each in (losses, tokens, right))
        above = {"loss": loss, "answer_token_accuracy": hits}
        scores = {name: ratio_of_sums(each, count, draws) for name, each in above.items()}
        return Group(len(rows), scores, counts={"num_tokens": int(count.sum())})

    return group


def guessed_texts(losses: np.ndarray, tokens: np.ndarray, characters: np.ndarray) -> Scorer:
    """Scores of a language model on raw text: loss a token in nats, perplexity, and bits a character.

    Bits a character are the summed loss over ln 2 and the characters: they can be compared between tokenizers.
    `losses` are summed cross-entropies in nats, `tokens` and `characters` those that count, each [rows].
    """

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        loss, count, letters = (each[rows].astype(np.float64) for each in (losses, tokens, characters))
        nats, bits = ratio_of_sums(loss, count, draws), ratio_of_sums(loss / math.log(2), letters, draws)
        with np.errstate(over="ignore"):  # infinite where Python's own exp would fail
            perplexity = Estimate(*np.exp([nats.value, nats.low, nats.high]).tolist())
        scores = {"loss": nats, "perplexity": perplexity, "bits_per_character": bits}
        counts = {"num_tokens": int(count.sum()), "num_characters": int(letters.sum())}
        return Group(len(rows), scores, counts=counts)

    return group


def written_answers(answers: Sequence[str], references: Sequence[str]) -> Scorer:
    """Scores answers that the model wrote, [rows] each.

    chrF compares character n-grams, so it reads every script. It goes from 0 to 100, and is that of all answers
    together, as sacreBLEU counts it. Exact match is the share of answers that equal the right one; line
    breaks and extra spaces are ignored.
    """
    from sacrebleu.metrics.chrf import CHRF  # slow to import

    metric = CHRF()
    counts = np.array(chrf_counts(metric, answers, references), np.float64)
    is_same = np.array([ours.split() == right.split() for ours, right in zip(answers, references, strict=True)])

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        columns, whole = list(counts[rows].T), counts[rows].sum(0)
        drawn = [chrf_of(metric, each) for each in resampled_sums(columns, draws).tolist()]
        chrf = estimate(chrf_of(metric, whole.tolist()), np.array(drawn))
        same = ratio_of_sums(is_same[rows].astype(np.float64), np.ones(len(rows)), draws)
        return Group(len(rows), {"chrf": chrf, "exact_match": same})

    return group
