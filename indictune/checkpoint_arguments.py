"""What `indictune checkpoint` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from indictune.errors import UserError


@dataclass
class CheckpointArguments:
    """Which checkpoints are looked at, and what one of them becomes.

    Raises:
        UserError: the folder is not named.
    """

    folder: str = field(
        default="",
        metadata={"help": "A run's --output_dir or one checkpoint-<step> of it; may be given as a bare first word."},
    )
    convert_to: str | None = field(
        default=None,
        metadata={
            "help": "Gets the checkpoint as a plain model; must not exist, or be empty. Of a run, the best one is "
            "taken, or the newest where none is."
        },
    )
    trust_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Read pickles of a checkpoint that is not in a run's folder, or that others could have written. "
            "They can run code when they are read."
        },
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})

    def __post_init__(self) -> None:
        if not self.folder:
            raise UserError("The folder is missing: indictune checkpoint DIR [--convert_to FOLDER].")
