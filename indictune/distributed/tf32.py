"""TF32: a GPU multiplies fp32 with 10 of its 23 bits."""

from __future__ import annotations

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available


def default(training: TrainingArguments) -> bool | None:
    """The value of `--tf32` if it is not given; None if it has no effect, as on a T4 or a V100.

    A model in half precision may compute the rest in TF32. A compiled model in fp32 stays as exact as a plain one:
    transformers (5.23) would switch TF32 on.
    """
    if not is_torch_tf32_available():
        return None
    if training.bf16 or training.fp16 or training.bf16 is None:  # None: TRL computes in bf16
        return True
    is_compiled = training.torch_compile or training.torch_compile_backend or training.torch_compile_mode
    return False if is_compiled else None


def put_back(args: TrainingArguments) -> None:
    """Switch TF32 off again after accelerate (1.15, `AcceleratorState`) has switched it on for a compiled model."""
    if args.torch_compile and args.tf32 is False:
        torch.backends.cuda.matmul.allow_tf32 = False
