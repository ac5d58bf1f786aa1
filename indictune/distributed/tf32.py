"""Whether a GPU multiplies fp32 in TF32, which keeps 10 of its 23 bits."""

from __future__ import annotations

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

# Flags by any of which the model is compiled.
COMPILING_FLAGS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def default(training: TrainingArguments) -> bool | None:
    """The value of `--tf32` where it is not given; None where it has no effect, as on a T4 or a V100.

    Where most is computed in half precision, the rest in fp32 need not be more exact. A compiled model in fp32 stays
    as exact as a plain one: transformers (5.23) would give it TF32.
    """
    if not is_torch_tf32_available():
        return None
    if training.bf16 or training.fp16 or training.bf16 is None:  # None: TRL computes in bf16
        return True
    return False if any(getattr(training, flag) for flag in COMPILING_FLAGS) else None


def put_back(args: TrainingArguments) -> None:
    """Switch TF32 off again, which accelerate switches on for a compiled model. To be called after it is set up.

    accelerate (1.15, `AcceleratorState`, state.py:1025) sets `allow_tf32` wherever a model in fp32 is compiled on a
    GPU, and under DeepSpeed one in bf16 too, after transformers (5.23, `TrainingArguments`) has switched it off.
    """
    if args.torch_compile and args.tf32 is False:
        torch.backends.cuda.matmul.allow_tf32 = False
