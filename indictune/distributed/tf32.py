"""Whether a GPU multiplies fp32 in TF32, which has 10 bits of its 23: what a run decides, and what keeps to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from indictune.distributed.torch_compile import FLAGS


def decided(planned: Callable[[str], Any]) -> bool | None:
    """What `--tf32` is where nobody says; None where nothing would change it: a T4 and a V100 have none.

    Where most is computed in half precision, what stays in fp32 need not be more exact. A compiled model in fp32 is as
    exact as a plain one: transformers (5.23) would give it TF32.

    Args:
        planned: the value that a field of the training arguments will have.
    """
    if not is_torch_tf32_available():
        return None
    if planned("bf16") or planned("fp16") or planned("bf16") is None:  # None: TRL computes in it
        return True
    return False if any(map(planned, FLAGS)) else None


def put_back(args: TrainingArguments) -> None:
    """Switch TF32 off again, which accelerate switches on for a compiled model. To be called after it is set up.

    accelerate (1.15, `AcceleratorState`, state.py:1025) sets `allow_tf32` wherever a model in fp32 is compiled on a
    GPU, and under DeepSpeed one in bf16 too, after transformers (5.23, `TrainingArguments`) has switched it off.
    """
    if args.torch_compile and args.tf32 is False:
        torch.backends.cuda.matmul.allow_tf32 = False
