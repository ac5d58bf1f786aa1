"""The norm of a step's gradients after clipping, under every strategy."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from indictune.distributed.pipeline.engine import Pipeline


def max_norm(trainer: Trainer) -> float:
    """The largest norm that clipping leaves; 0 clips nothing."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        engine: Any = trainer.model_wrapped
        return float(engine.gradient_clipping())
    return float(trainer.args.max_grad_norm)


def norm_after_clipping(trainer: Trainer, pipeline: Pipeline | None) -> float | None:
    """The norm of the gradients as they are before the optimizer's step. All ranks must call it.

    None under DeepSpeed, whose engine has taken the step, and with fp16, whose gradients are scaled.
    """
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED or trainer.args.fp16:
        return None
    if pipeline is not None:
        return float(pipeline.norm())
    norm: Any = Trainer._get_grad_norm(trainer, trainer.model_wrapped)  # type: ignore[no-untyped-call]
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
