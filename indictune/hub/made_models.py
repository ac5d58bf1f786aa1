"""`indictune merge` and `indictune checkpoint`, with a card for the model that they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indictune.checkpoint.command import checkpoint_command
from indictune.config.command_arguments import CheckpointArguments, MergeArguments
from indictune.config.recipe import read_arguments


def merge_with_card(argv: Sequence[str]) -> int:
    """`merge_command`; the card has the scores of the adapter."""
    from indictune.hub.card import write_card  # slow, as torch is
    from indictune.models.merge import merge_command

    args, code = read_arguments(argv, MergeArguments, "--adapter"), merge_command(argv)
    write_card(Path(args.output_dir), run=Path(args.adapter))
    return code


def checkpoint_with_card(argv: Sequence[str]) -> int:
    """`checkpoint_command`; the card of a converted checkpoint has no scores, which are those of another step."""
    args, code = read_arguments(argv, CheckpointArguments, "--folder"), checkpoint_command(argv)
    if args.convert_to is not None:
        from indictune.hub.card import write_card  # slow

        write_card(Path(args.convert_to))
    return code
