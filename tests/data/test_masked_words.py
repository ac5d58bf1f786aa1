"""Words are masked whole, by seed, epoch and row alone."""

from __future__ import annotations

import numpy as np
import torch

from indictune.data.batching import NO_ROW
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.data.documents import Masking, MaskWords

MASK = 4
MASKING = Masking(0.15, MASK, np.arange(10, 1000))


def row(number: int, words: list[int], epoch: int = 0) -> Row:
    """A row of words of so many tokens, in special tokens."""
    labels = np.array([-100, *np.repeat(np.arange(len(words)), words), -100], np.int32)
    ids = np.array([2, *range(1000 * number + 10, 1000 * number + 10 + sum(words)), 3], np.int32)
    return {"input_ids": ids, "labels": labels, "seq_lengths": np.array([len(ids)]), "row": number, "epoch": epoch}


def test_a_word_is_masked_whole_or_not_at_all_and_special_tokens_never() -> None:
    words = row(0, [1, 3, 2, 5, 1, 1, 4] * 6)
    for seed in range(20):
        ids, labels = MASKING.apply(words["input_ids"], words["labels"], [seed])
        hidden = labels != -100
        of_words = [hidden[words["labels"] == word] for word in range(42)]
        assert all(each.all() or not each.any() for each in of_words)
        assert not hidden[[0, -1]].any()
        assert (labels[hidden] == words["input_ids"][hidden]).all()
        assert (ids[~hidden] == words["input_ids"][~hidden]).all()
        assert 0 < hidden.sum() <= 0.15 * 102


def test_masks_are_of_the_share_and_of_three_kinds() -> None:
    words = row(0, [1] * 20_000)
    ids, labels = MASKING.apply(words["input_ids"], words["labels"], [1])
    hidden = labels != -100
    assert hidden.mean() == np.float64(0.15).round(2) or abs(hidden.mean() - 0.15) < 1e-3
    shares = [(ids[hidden] == MASK).mean(), (ids[hidden] == words["input_ids"][hidden]).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1], atol=0.02)


def test_one_word_at_least_is_masked_and_a_long_one_whole() -> None:
    _, labels = MASKING.apply(row(0, [6])["input_ids"], row(0, [6])["labels"], [0])
    assert (labels != -100).sum() == 6
    _, labels = MASKING.apply(np.array([2, 3]), np.array([-100, -100]), [0])
    assert (labels == -100).all()


def test_a_row_has_its_masks_in_every_micro_batch_and_others_in_the_next_epoch() -> None:
    mask = MaskWords(JoinRows(), MASKING, seed=17)
    rows = [row(0, [2, 1, 3, 1] * 5), row(1, [1, 1, 2] * 6), row(2, [4, 4, 4])]
    together = mask(rows)
    alone = [mask([each]) for each in reversed(rows)]
    assert together["labels"][0].tolist() == torch.cat([each["labels"][0] for each in reversed(alone)]).tolist()
    assert together["input_ids"][0, together["masked_places"]].shape == together["labels"][0].shape
    joined = torch.cat([each["input_ids"][0] for each in reversed(alone)])
    assert together["input_ids"][0].tolist() == joined.tolist()
    later = mask([row(0, [2, 1, 3, 1] * 5, epoch=1)])
    assert later["labels"].tolist() != alone[-1]["labels"].tolist()
    other_seed = MaskWords(JoinRows(), MASKING, seed=18)([rows[0]])
    assert other_seed["labels"].tolist() != alone[-1]["labels"].tolist()


def test_padded_rows_have_the_masks_of_joined_ones() -> None:
    rows = [row(0, [2, 1, 3, 1] * 5), row(1, [1, 1, 2])]
    padded, joined = (MaskWords(each, MASKING, 0)(rows) for each in (PadToLongest(0, "right"), JoinRows()))
    assert padded["labels"].tolist() == joined["labels"].tolist()
    places = padded["input_ids"].flatten()[padded["masked_places"]]
    assert places.tolist() == joined["input_ids"].flatten()[joined["masked_places"]].tolist()


def test_a_dummy_row_counts_nothing() -> None:
    dummy = {
        "input_ids": np.array([2, 5]),
        "labels": np.array([-100, -100]),
        "seq_lengths": np.array([2]),
        "row": NO_ROW,
    }
    batch = MaskWords(JoinRows(), MASKING, 0)([dummy])
    assert batch["labels"].tolist() == [[-100]]
    assert batch["masked_places"].tolist() == [0]
