"""Writes the model of a trainer to a folder, mending what the libraries leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase, Trainer

from indictune.checkpoint import store
from indictune.distributed import node_disks, sharding
from indictune.models.active_vocabulary import save_row_ids, save_whole_vocabulary
from indictune.models.adapters import save_adapter_extras
from indictune.models.model_description import save_description


def write_model(trainer: Trainer, folder: Path, write: Callable[[], None]) -> None:
    """Write a model. All ranks must call it.

    The library's own saving lacks: the folder, where checkpoints are in shards; an adapter's configuration (peft); a
    split model's own code (`sharding.save_code`); and the untrained rows of an embedding. Rank 0 alone writes: the
    Trainer (5.23) would write on every disk, where no other rank has whole weights ("KeyError", or an adapter of empty
    tensors). `node_disks.give_files` brings the model to the other disks.

    Args:
        trainer: whose model it is.
        folder: gets it; it is made on every disk.
        write: the library's saving, into `folder`.
    """
    args = trainer.args
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
    with node_disks.rank_0_alone_saves(args):
        model = sharding.bare(trainer)
        if args.should_save:
            sharding.save_code(model, folder)
        write()
        if args.should_save:
            save_adapter_extras(model, folder)
            save_whole_vocabulary(model, folder)
            if folder.name.startswith(store.PREFIX):
                save_row_ids(model, folder)
                if not list(folder.glob("*.safetensors")):  # a checkpoint in shards says of which model it is
                    tokenizer = cast(PreTrainedTokenizerBase, trainer.processing_class)
                    save_description(model, sharding.architecture_of(model), tokenizer, folder)
