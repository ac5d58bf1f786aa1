"""Read the saved model again and compare it with the trained one, before the run is called done.

Adapters have been saved as empty tensors (peft#453, DeepSpeed#4295), and as one rank's slice (accelerate#4206).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import nn

from indictune.data.collation import PadToLongest
from indictune.distributed import collectives, sharding
from indictune.models.active_vocabulary import active_embedding
from indictune.models.own_code import runs_own_code
from indictune.run import OWN_PROGRESS
from indictune.training.exact_trainer import ExactTrainer

logger = logging.getLogger(__name__)

PROBE_ROWS = 2
PROBE_TOKENS = 32
LARGE = 1_000_000_000  # parameters, from which on more threads are worth their start
MOST_PROBLEMS = 10  # in a message
ROWS_AT_ONCE = 16_384  # of an embedding that are compared: the memory of copies of all would take seconds to get

# How far numbers may lie apart, relative to their size. The trained model computes with 8 bits in half precision, and
# with 11 in TF32; a CPU multiplies in another order than a GPU.
IN_FULL_PRECISION = 1e-3
IN_LOW_PRECISION = 5e-2


Norms = dict[str, float]  # Euclidean norm of each trained parameter; of an active vocabulary, over the trained rows


class SavedModelError(RuntimeError):
    """The saved model is not the trained one."""


def verify_saved(trainer: ExactTrainer, folder: Path) -> None:
    """Read the model saved in `folder` on rank 0's CPU and compare it with the trained one. All ranks must call it.

    Each trained parameter must have its norm. Unused embedding rows must be unchanged. The logits of a few tokens must
    agree.

    Raises:
        SavedModelError: on all ranks, with the differences.
        Stopped: a rank was asked to stop, and a resumed run need not train again.
    """
    probe = _probe(trainer)
    logits, norms = _logits(trainer, probe), sharding.full_norms(trainer)
    trainer.look_for_stop("the saved model was read back; a resumed run saves it again", at_once=True)
    found: list[str] = []
    long_wait = collectives.long_wait_group(trainer.args)
    OWN_PROGRESS.passed("reading the saved model back")
    if trainer.is_world_process_zero():
        try:
            found = _problems(trainer, folder, norms, probe, logits)
        except Exception as error:  # any: the other ranks wait for the result
            logger.exception("The saved model cannot be read")
            found = [f"It cannot be read: {' '.join(str(error).split())}"]
    found = collectives.from_rank_0(found, long_wait)
    if found:
        raise SavedModelError(
            f"{folder}: the saved model is not the trained one; its checkpoints are untouched. " + " ".join(found)
        )
    logger.debug("The saved model was read again: it is the trained one")


def _probe(trainer: ExactTrainer) -> dict[str, torch.Tensor]:
    """A few tokens of the first training rows, cut to one length so that nothing is padded."""
    assert trainer.train_dataset is not None
    rows = trainer.train_dataset.select(range(min(PROBE_ROWS, len(trainer.train_dataset))))["input_ids"][:]
    length = min(PROBE_TOKENS, *(len(row) for row in rows))
    batch = PadToLongest(0, "right")([{"input_ids": row[:length], "labels": 0} for row in rows])
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _logits(trainer: ExactTrainer, probe: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the trained model, float32 on the CPU. All ranks take part: each may hold a part of the weights."""
    model = trainer.model_wrapped
    model.eval()
    inputs = trainer.on_device(probe)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        return trainer.parallelism.compute(inputs, lambda: model(**inputs).logits.float().cpu())


def _problems(
    trainer: ExactTrainer, folder: Path, norms: Norms, probe: dict[str, torch.Tensor], logits: torch.Tensor
) -> list[str]:
    """How the model in `folder` differs from the trained one. The reader refuses missing weights and other shapes."""
    trained = sharding.unwrapped(trainer)
    with sharding.loading_alone():
        saved = trainer.objective.load(folder, runs_own_code(trained), device_map="cpu")
    threads = torch.get_num_threads()
    if sum(each.numel() for each in saved.parameters()) > LARGE:
        torch.set_num_threads(os.cpu_count() or threads)  # launchers leave a process one; the other ranks wait
    try:
        tolerance = _tolerance(trainer, saved)
        problems = _problems_of_weights(saved, trained, norms, tolerance)[:MOST_PROBLEMS]
        return problems or _problems_of_logits(saved, probe, logits, tolerance)
    finally:
        torch.set_num_threads(threads)


def _tolerance(trainer: ExactTrainer, saved: nn.Module) -> float:
    """TF32 is switched on by different settings of torch (2.13): transformers (5.23) sets the newer one, accelerate
    (1.15) the older one, which cannot be read after the newer is set. `fp32_precision` shows both."""
    in_half = trainer.args.bf16 or trainer.args.fp16 or next(saved.parameters()).dtype != torch.float32
    in_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return IN_LOW_PRECISION if in_half or in_tf32 else IN_FULL_PRECISION


def _problems_of_weights(saved: nn.Module, trained: nn.Module, norms: Norms, tolerance: float) -> list[str]:
    weights = {name: weight.detach() for name, weight in saved.named_parameters() if name in norms}
    problems = []
    active = active_embedding(trained)
    if active is not None:
        name, embedding = active
        assert embedding.start is not None
        unused = (embedding.position_of.cpu() < 0).nonzero().flatten().split(ROWS_AT_ONCE)  # type: ignore[no-untyped-call]
        pairs = ((weights[name][rows], embedding.start[rows].float()) for rows in unused)
        if not all(torch.allclose(*pair, rtol=2**-8, atol=1e-7) for pair in pairs):  # as rounded to half precision
            problems.append(f"{name}: rows that no text uses have changed.")
        weights[name] = weights[name][embedding.row_ids]
    for name, norm in norms.items():
        found = float(weights[name].double().norm())
        if not abs(found - norm) <= tolerance * norm:  # nor is NaN
            problems.append(f"{name} has the norm {found:.6g} instead of {norm:.6g}.")
    return problems


def _problems_of_logits(
    saved: nn.Module, probe: dict[str, torch.Tensor], expected: torch.Tensor, tolerance: float
) -> list[str]:
    saved.eval()
    with torch.no_grad():
        logits = saved(**probe).logits.float()
    apart = float((logits - expected).norm() / expected.norm())
    if apart <= tolerance:
        return []
    return [f"Its logits differ by {apart:.2g} of their norm, where {tolerance:g} is allowed."]
