"""How ranks read a model's weights: each rank for itself, or rank 0 for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from indictune.progress import HERE

EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def reading_weights(args: TrainingArguments) -> Iterator[bool]:
    """A block in which a model's weights are read. All ranks must enter it.

    With `fsdp_cpu_ram_efficient_loading`, accelerate sends rank 0's weights to all ranks when it splits the model.

    Yields:
        Whether this rank has to read the weights.
    """
    HERE.passed("reading the weights")
    with _hidden_from_transformers() as is_efficient:
        yield not is_efficient or args.process_index == 0
    HERE.passed("making the trainer")


@contextmanager
def reading_alone(args: TrainingArguments) -> Iterator[None]:
    """A block in which one rank reads a whole model, without the other ranks."""
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        with _hidden_from_transformers():
            yield
    finally:
        config = vars(args).get("hf_deepspeed_config")  # only with DeepSpeed
        if config is not None:
            set_hf_deepspeed_config(config)  # type: ignore[no-untyped-call]


@contextmanager
def _hidden_from_transformers() -> Iterator[bool]:
    """A block in which transformers does not see `fsdp_cpu_ram_efficient_loading`; yields whether it is on.

    transformers' own handling (5.23) saves nothing, since every rank reads all weights. And it leaves weights that the
    checkpoint lacks without data on all ranks but one ("KeyError" when such an optimizer is saved).
    """
    before = os.environ.pop(EFFICIENT_LOADING, None)
    try:
        yield before == "true"
    finally:
        if before is not None:
            os.environ[EFFICIENT_LOADING] = before
