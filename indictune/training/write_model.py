"""Write the model of a trainer to a folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from indictune.checkpoint import store
from indictune.distributed import node_disks, sharding
from indictune.distributed.model_state import write_weights
from indictune.models.active_vocabulary import save_row_ids, save_whole_vocabulary
from indictune.models.adapters import save_adapter_extras
from indictune.training.task_trainer import TaskTrainer


def write_model(trainer: TaskTrainer, folder: Path, save: Callable[[], None]) -> None:
    """Write a model with what the library's saving leaves out. All ranks must call it.

    Rank 0 alone writes. The Trainer (5.23) would also write on other disks, where no rank has whole weights: it fails
    with "KeyError", or writes empty tensors. `node_disks.give_files` brings the model there.

    Args:
        trainer: of the model.
        folder: is made on every disk. A checkpoint's may get shards later, in place of whole weights.
        save: the library's saving, into `folder`.
    """
    args, is_checkpoint = trainer.args, folder.name.startswith(store.PREFIX)
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
    with node_disks.rank_0_alone_saves(args):
        model = sharding.unwrapped(trainer)
        if args.should_save:
            sharding.save_code(model, folder)
        write_weights(trainer, folder, is_checkpoint, save, trainer.pipeline)
        if not args.should_save:
            return
        save_adapter_extras(model, folder)
        save_whole_vocabulary(model, folder)
        if is_checkpoint:
            save_row_ids(model, folder)
            if not list(folder.glob("*.safetensors")):  # in shards, which do not say which model they belong to
                _save_description(model, folder)
                cast(PreTrainedTokenizerBase, trainer.processing_class).save_pretrained(folder)


def _save_description(model: nn.Module, folder: Path) -> None:
    """Save configuration and generation settings, or an adapter's; `save_adapter_extras` saves the rest of it."""
    if isinstance(model, PeftModel):
        adapter = copy.copy(model.peft_config[model.active_adapter])
        adapter.inference_mode = True
        adapter.save_pretrained(str(folder))
        return
    plain = cast(PreTrainedModel, model)
    plain.config.architectures = [sharding.architecture_of(model)]
    plain.config.save_pretrained(folder)
    if plain.can_generate():
        plain.generation_config.save_pretrained(folder)
