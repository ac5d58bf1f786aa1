"""Whether what was saved is what was trained: it is read again and compared before the run is called done.

Adapters have been saved as empty tensors (peft#453, DeepSpeed#4295), and as one rank's slice (accelerate#4206).
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn

from indictune.data.collation import PadToLongest
from indictune.distributed import collectives, sharding
from indictune.models.active_vocabulary import ActiveEmbedding, active_embedding
from indictune.models.load import runs_own_code
from indictune.progress import HERE
from indictune.train.exact_trainer import ExactTrainer

logger = logging.getLogger(__name__)

PROBE_ROWS = 2
PROBE_TOKENS = 32
LARGE = 1_000_000_000  # parameters, from which on more threads are worth their start

# How far the logits may lie apart, as a share of their length. In half precision the trained model has computed them
# with 8 bits, in TF32 with 11, and a CPU multiplies in another order than a GPU.
IN_FULL_PRECISION = 1e-3
IN_TF32 = 1e-2
IN_HALF_PRECISION = 5e-2


class SavedModelError(RuntimeError):
    """What was saved is not what was trained."""


@dataclass(frozen=True)
class Facts:
    """What is known of the trained model.

    Attributes:
        shapes: of each parameter, whole.
        norms: Euclidean length of each trained parameter, whole; of an embedding, that of its trained rows.
        active: name and module of an embedding of which only some rows are trained, or None.
        probe: a few tokens.
        logits: of the probe, float32.
    """

    shapes: dict[str, tuple[int, ...]]
    norms: dict[str, float]
    active: tuple[str, ActiveEmbedding] | None
    probe: dict[str, torch.Tensor]
    logits: torch.Tensor


def verify_saved(trainer: ExactTrainer, folder: Path) -> None:
    """Read the saved model on rank 0's CPU and compare it with the trained one. All ranks must call it.

    Every parameter must be there in its whole shape, the trained ones with their length, embedding rows that no text
    uses as they began, no tensor may be empty, not all LoRA matrices B may be zero (they begin so), and the logits of
    a few tokens must agree.

    Args:
        trainer: after the last save.
        folder: what was saved.

    Raises:
        SavedModelError: on all ranks, with everything that differs.
        Stopped: a rank was asked to stop, and going on need not train again.
    """
    probe = _probe(trainer)
    trained = _logits(trainer, probe)
    model = sharding.unwrapped(trainer)
    facts = Facts(shapes_when_saved(model), sharding.full_norms(trainer), active_embedding(model), probe, trained)
    trainer.look_for_stop("the saved model was read back; going on saves it again", at_once=True)
    found: list[str] = []
    long_wait = collectives.long_wait_group(trainer.args)
    HERE.passed("reading the saved model back")
    if trainer.is_world_process_zero():
        try:
            found = _problems(trainer, folder, facts)
        except Exception as error:  # whatever it is: the other ranks wait for this one's word
            logger.exception("The saved model cannot be read")
            found = [f"It cannot be read: {' '.join(str(error).split())}"]
    found = collectives.from_rank_0(found, long_wait)
    if found:
        raise SavedModelError(
            f"{folder}: the saved model is not the trained one; its checkpoints are untouched. " + " ".join(found)
        )
    logger.info("The saved model was read again: it is the trained one")


def shapes_when_saved(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of each parameter, whole and with all rows of the embedding."""
    shapes, active = sharding.full_shapes(model), active_embedding(model)
    if active is not None:
        name, embedding = active
        shapes[name] = (len(embedding.position_of), embedding.embedding_dim)
    return shapes


def _probe(trainer: ExactTrainer) -> dict[str, torch.Tensor]:
    """A few tokens of the first training rows, cut to one length so that nothing is padded."""
    assert trainer.train_dataset is not None
    rows = trainer.train_dataset.select(range(min(PROBE_ROWS, len(trainer.train_dataset))))["input_ids"][:]
    length = min(PROBE_TOKENS, *(len(row) for row in rows))
    batch = PadToLongest(0, "right")([{"input_ids": row[:length], "labels": 0} for row in rows])
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _logits(trainer: ExactTrainer, probe: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the trained model, float32 on the CPU. All ranks take part: each may hold a part of the weights."""
    model = trainer.model_wrapped
    model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits: torch.Tensor = model(**{name: tensor.to(trainer.args.device) for name, tensor in probe.items()}).logits
    return logits.float().cpu()


def _problems(trainer: ExactTrainer, folder: Path, facts: Facts) -> list[str]:
    """What a folder's model lacks, or has otherwise than the trained one."""
    problems = _problems_of_files(folder)
    if problems:
        return problems
    threads = torch.get_num_threads()
    if sum(map(math.prod, facts.shapes.values())) > LARGE:
        torch.set_num_threads(os.cpu_count() or threads)  # launchers leave a process one; the other ranks wait
    try:
        with sharding.loading_alone(trainer.args):
            saved = trainer.objective.reload(
                folder, runs_own_code(sharding.unwrapped(trainer)), trainer.trusts_checkpoint
            )
        allowed = _allowed(trainer, saved)
        problems = _problems_of_model(saved, facts, folder, allowed)
        return problems or _problems_of_logits(saved, facts, _allowed_of_logits(allowed))
    finally:
        torch.set_num_threads(threads)


def _problems_of_files(folder: Path) -> list[str]:
    """Empty tensors, and an adapter that has learned nothing."""
    problems = []
    matrices = trained = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                if 0 in file.get_slice(name).get_shape():
                    problems.append(f"{path.name}: {name} is empty.")
                elif "lora_B" in name:
                    matrices += 1
                    trained += bool(file.get_tensor(name).any())
    if matrices and not trained:
        problems.append("All LoRA matrices B are zero: the adapter has learned nothing.")
    return problems


def _allowed(trainer: ExactTrainer, saved: nn.Module) -> float:
    """How far numbers may lie apart, as a share of them."""
    half = trainer.args.bf16 or trainer.args.fp16 or next(saved.parameters()).dtype != torch.float32
    return IN_HALF_PRECISION if half else IN_FULL_PRECISION


def _allowed_of_logits(allowed: float) -> float:
    """More than of weights where fp32 is multiplied in TF32, by `--tf32`, which comes with half precision.

    transformers (5.23, `enable_tf32`) and accelerate (1.15, `AcceleratorState`) switch it on by different settings of
    torch (2.13). Asked is for what comes of both; the older one, `allow_tf32`, cannot be read after the newer is set.
    """
    return max(allowed, IN_TF32) if torch.backends.cuda.matmul.fp32_precision == "tf32" else allowed


def _problems_of_model(saved: nn.Module, facts: Facts, folder: Path, allowed: float) -> list[str]:
    """Parameters that are missing, have another shape than the trained ones, or hold something else."""
    there = dict(saved.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in there.items()}
    problems = [
        f"{name} has the shape {shapes.get(name, 'of nothing')} instead of {shape}."
        for name, shape in facts.shapes.items()
        if shapes.get(name) != shape
    ]
    if isinstance(saved, PeftModel):
        # peft leaves what the file lacks at its first value, with a warning.
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            in_file = set(file.keys())
        missing = sorted(set(get_peft_model_state_dict(saved)) - in_file)
        problems += [f"adapter_model.safetensors lacks {name}." for name in missing]
    if not problems:
        trained = {name: there[name].detach() for name in facts.norms}
        if facts.active is not None:
            name, embedding = facts.active
            problems += _problems_of_unused_rows(name, embedding, trained[name], allowed)
            trained[name] = trained[name][embedding.row_ids]
        found = {name: float(each.double().norm()) for name, each in trained.items()}
        problems += [
            f"{name} has the length {found[name]:.6g} instead of {norm:.6g}."
            for name, norm in facts.norms.items()
            if not abs(found[name] - norm) <= allowed * norm  # NaN is none
        ]
    return problems[:10]


def _problems_of_unused_rows(name: str, embedding: ActiveEmbedding, saved: torch.Tensor, allowed: float) -> list[str]:
    """Rows that no text uses, and that are not as they began, but for the rounding of a model saved in half precision.

    Args:
        name: of the weight.
        embedding: of the trained model.
        saved: [vocabulary, width], float32.
        allowed: as from `_allowed`.
    """
    assert embedding.start is not None
    unused = embedding.position_of.cpu() < 0
    relative, absolute = (0.0, 0.0) if allowed == IN_FULL_PRECISION else (2**-8, 1e-7)
    same = torch.isclose(saved[unused], embedding.start[unused].float(), rtol=relative, atol=absolute)
    changed = int((~same).any(1).sum())
    return [f"{name}: {changed} rows that no text uses have changed."] if changed else []


def _problems_of_logits(saved: nn.Module, facts: Facts, allowed: float) -> list[str]:
    saved.eval()
    with torch.no_grad():
        logits = saved(**facts.probe).logits.float()
    apart = float((logits - facts.logits).norm() / facts.logits.norm())
    if apart <= allowed:
        return []
    return [f"Its logits differ by {apart:.2g} of their length, where {allowed:g} is allowed."]
