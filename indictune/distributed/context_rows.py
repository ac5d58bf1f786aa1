"""Which tokens of a micro-batch each rank of a context group has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from indictune.config.plan import Launch
from indictune.data.collation import IGNORED_LABEL, Row
from indictune.tasks.objective import Collator

PART = "context_part"  # a rank's part, among the inputs of a model


@dataclass(frozen=True)
class Part:
    """The tokens of a sequence that one rank has.

    The sequence is cut into twice as many pieces as there are ranks. The first rank has the first piece and the last,
    the second rank those within, and so on: a later token sees more tokens, and so each rank computes as much as the
    others (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2).

    Attributes:
        boundaries: the start of each document in the sequence, and the end of the last one.
        rank: of the context group.
        ranks: in the group.
    """

    boundaries: tuple[int, ...]
    rank: int
    ranks: int

    @cached_property
    def pieces(self) -> list[range]:
        """Tokens of each piece, in the order of the sequence."""
        tokens, count = self.boundaries[-1], 2 * self.ranks
        cuts = [number * tokens // count for number in range(count + 1)]
        return [range(start, end) for start, end in pairwise(cuts)]

    def pieces_of(self, rank: int) -> tuple[range, range]:
        """Those of a rank, which it keeps in this order."""
        return self.pieces[rank], self.pieces[-1 - rank]

    @cached_property
    def most_tokens(self) -> int:
        """Of any rank."""
        return max(sum(map(len, self.pieces_of(rank))) for rank in range(self.ranks))

    @cached_property
    def seen(self) -> list[tuple[int, range]]:
        """For each run of own tokens in one document, their number and the tokens that the last of them sees."""
        return [
            (min(end, piece.stop) - max(start, piece.start), range(start, min(end, piece.stop)))
            for piece in self.pieces_of(self.rank)
            for start, end in pairwise(self.boundaries)
            if max(start, piece.start) < min(end, piece.stop)
        ]

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of [rows, tokens]."""
        return torch.cat([values[:, piece.start : piece.stop] for piece in self.pieces_of(self.rank)], 1)


class OwnTokens:
    """Collates a micro-batch, of which the rank keeps its part.

    Labels are shifted before, because the next token may be on another rank. TRL reads `shift_labels`; the Trainer
    counts them where `labels` are, too.

    Args:
        collator: gives `input_ids` and `labels` [rows, tokens], padded on the right or joined.
        rank: of the context group.
        ranks: in the group.
    """

    def __init__(self, collator: Collator, rank: int, ranks: int) -> None:
        self.collator = collator
        self.rank, self.ranks = rank, ranks

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """`input_ids`, `position_ids`, `labels` and `shift_labels`, int64 [rows, own tokens]; the `Part` as `PART`;
        and, for evaluation, `row_numbers`."""
        batch = self.collator(rows)
        input_ids, labels = batch["input_ids"], batch["labels"]
        positions = batch.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids))
        boundaries = batch["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in batch else [0, input_ids.shape[1]]
        missing = max(0, self.ranks - boundaries[-1])  # no rank is without a token
        boundaries[-1] += missing
        part = Part(tuple(boundaries), self.rank, self.ranks)
        shifted = functional.pad(labels[:, 1:], (0, 1 + missing), value=IGNORED_LABEL)
        own = {
            "input_ids": part.own(functional.pad(input_ids, (0, missing))),
            "position_ids": part.own(functional.pad(positions, (0, missing))),
            "labels": part.own(shifted),
            "shift_labels": part.own(shifted),
        }
        return {PART: part, **own} | {name: batch[name] for name in ("row_numbers",) if name in batch}


def own_tokens(collator: Collator, launch: Launch) -> Collator:
    """The collator of a rank of a run: of its part of each micro-batch, if a context group shares the tokens."""
    axes = launch.axes
    if axes.context == 1:
        return collator
    return OwnTokens(collator, launch.rank // axes.tensor % axes.context, axes.context)


def summed(measured: Sequence[Tensor], group: ProcessGroup | None) -> Iterator[Tensor]:
    """Sums over a context group, if there is one, of what each rank measured of its tokens of each row, [rows]."""
    for each in measured:
        if group is not None:
            torch.distributed.all_reduce(each, group=group)
        yield each
