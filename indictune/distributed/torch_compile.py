"""Whether torch compiles for a run, and may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from indictune.errors import UserError
from indictune.models.compile_cache import check_kept_from_others

FLAGS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")  # by any of which the model is compiled


def check_compiling(training: Callable[[str], Any], model: Callable[[str], Any], environ: Mapping[str, str]) -> None:
    """Refuse what compiles without the recipe's knowledge, or where others can write to what torch has compiled.

    Args:
        training: the value that a field of the training arguments will have.
        model: the same of the model's.
        environ: of this process.

    Raises:
        UserError: the launcher asks to compile, or other users can write to torch's folder.
    """
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend != "NO":
        raise UserError(
            f"accelerate's --dynamo_backend (dynamo_config in its file) is {backend.lower()}: recipe.yaml would not "
            "have it. Leave it out, and give the script "
            f"--torch_compile true --torch_compile_backend {backend.lower()}."
        )
    if is_asked_for(training, model):
        check_kept_from_others()


def check_quantised(stored: Mapping[str, Any]) -> None:
    """The same of weights that bitsandbytes has quantised, for which it may compile on a CPU, as for QLoRA.

    Args:
        stored: how they are quantised; empty where they are not.

    Raises:
        UserError: other users can write to torch's folder.
    """
    if (stored.get("load_in_4bit") or stored.get("load_in_8bit")) and not torch.cuda.is_available():
        check_kept_from_others()


def is_asked_for(training: Callable[[str], Any], model: Callable[[str], Any]) -> bool:
    """Whether torch compiles for a run: its own code, an attention, or bitsandbytes' (0.50) on a CPU, whose library
    does not know every shape; that of GPUs has all.

    Args:
        training: the value that a field of the training arguments will have.
        model: the same of the model's.
    """
    of_4_bits = model("method") == "qlora" and not torch.cuda.is_available()
    return of_4_bits or model("attn_implementation") == "flex_attention" or any(map(training, FLAGS))
