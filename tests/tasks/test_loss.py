"""The loss of a global batch, however it is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from indictune.data.collation import IGNORED_LABEL
from indictune.tasks.loss import ExactLoss

WEIGHTS = torch.tensor([0.5, 2.0, 1.25])


def cut(loss: ExactLoss, logits: torch.Tensor, labels: torch.Tensor, parts: int) -> torch.Tensor:
    """The sum of the shares of `parts` micro-batches; one that gets no row holds a dummy row."""
    total = torch.zeros(())
    for rows in torch.arange(len(labels)).tensor_split(parts):
        dummy = len(rows) == 0
        part_logits = torch.full((1, 3), 9.0) if dummy else logits[rows]
        part_labels = torch.tensor([IGNORED_LABEL]) if dummy else labels[rows]
        total = total + loss(SimpleNamespace(logits=part_logits), part_labels, torch.tensor(len(labels)))
    return total


def example(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 3, generator=generator).requires_grad_()
    return logits, torch.randint(3, (rows,), generator=generator)


def by_hand(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float) -> torch.Tensor:
    """mean over rows of: (1 - s) w[y] (-log p[y]) + s / 3 x sum over labels of w[c] (-log p[c])."""
    surprise = -torch.log_softmax(logits, -1)
    rows = torch.arange(len(labels))
    own = weights[labels] * surprise[rows, labels]
    spread = (weights * surprise).sum(-1) / 3
    return ((1 - smoothing) * own + smoothing * spread).sum() / len(labels)


def test_two_rows_by_hand() -> None:
    # -log of 3/4 and of 1/2: the logits are the logarithms of probabilities.
    logits = torch.log(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    outputs = SimpleNamespace(logits=logits)
    share = ExactLoss()(outputs, torch.tensor([0, 1]), torch.tensor(8))
    assert share.item() == pytest.approx((0.28768207 + 0.69314718) / 8)


@given(st.integers(1, 20), st.integers(1, 8))
def test_the_shares_add_up_to_torchs_mean_over_the_whole_batch(rows: int, parts: int) -> None:
    logits, labels = example(rows)
    torch.testing.assert_close(cut(ExactLoss(), logits, labels, parts), functional.cross_entropy(logits, labels))


@given(st.integers(1, 20), st.integers(1, 8))
def test_label_smoothing_is_torchs_over_the_whole_batch(rows: int, parts: int) -> None:
    logits, labels = example(rows)
    whole = functional.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(cut(ExactLoss(label_smoothing=0.2), logits, labels, parts), whole)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("parts", [1, 2, 4, 9])
def test_class_weights_multiply_rows_and_leave_the_divisor_alone(parts: int, smoothing: float) -> None:
    logits, labels = example(7)
    loss = ExactLoss(WEIGHTS, smoothing)
    torch.testing.assert_close(
        cut(loss, logits, labels, parts), by_hand(logits, labels, WEIGHTS, smoothing), rtol=1e-5, atol=1e-6
    )


def test_class_weights_are_moved_to_the_device_once() -> None:
    """Else the host would wait for a GPU at each micro-batch."""
    loss, moved = ExactLoss(WEIGHTS), []
    outputs = SimpleNamespace(logits=torch.zeros(2, 3, device="meta"))
    for _ in range(2):
        loss(outputs, torch.zeros(2, dtype=torch.int64, device="meta"), torch.tensor(2, device="meta"))
        moved.append(loss.class_weights)
    assert moved[0] is moved[1]
    assert [each is not None and each.device.type for each in moved] == ["meta", "meta"]


def test_gradients_do_not_depend_on_the_cut() -> None:
    loss = ExactLoss(WEIGHTS, 0.1)
    gradients = []
    for parts in (1, 3, 11):
        logits, labels = example(8)
        cut(loss, logits, labels, parts).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        gradients.append(logits.grad)
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_half_precision_logits_are_computed_in_fp32() -> None:
    logits = torch.tensor([[3.0, -2.0, 0.5]], dtype=torch.bfloat16)
    share = ExactLoss()(SimpleNamespace(logits=logits), torch.tensor([1]), torch.tensor(1))
    assert share.dtype == torch.float32
    assert share.item() == functional.cross_entropy(logits.float(), torch.tensor([1])).item()


def test_a_trainer_that_does_not_count_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="num_items_in_batch is None"):
        ExactLoss()(SimpleNamespace(logits=torch.zeros(1, 3)), torch.tensor([0]))


def test_evaluation_reports_the_plain_loss_of_each_row() -> None:
    logits = torch.log(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]]))
    losses = ExactLoss.each(logits.double(), torch.tensor([1, 0, IGNORED_LABEL]))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([1.3862944, 0.6931472, 0.0])
