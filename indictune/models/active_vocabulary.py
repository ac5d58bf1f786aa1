"""Active vocabulary: only the embedding rows that the data uses are trained, and saved models have all rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from indictune.errors import UserError
from indictune.models.load import Model
from indictune.models.weight_files import INDEX, WHOLE

ROW_IDS = "active_vocabulary.json"  # beside the optimizer's states, whose rows they name
UNUSED = "active_vocabulary.sha256"  # beside it, the digest of the other rows, which a checkpoint in shards has not
ROWS_AT_ONCE = 10_000
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")  # values of --optim


class ActiveEmbedding(nn.Embedding):
    """Some rows of an embedding, looked up by the token ids of all of them.

    Its parameter has the name that the whole embedding's has, and as many rows as are used. A token whose row is not
    among them is an index error. Gradient, clipping and optimizer see what they would see of the whole embedding: the
    rows left out have no gradient there.

    Args:
        whole: [vocabulary, width], the weight that training starts from.
        row_ids: int64 [rows], ascending: which rows are used.
        padding_id: the used row that has no gradient, or None.
        keeps_start: keep all rows in CPU memory, for models that this process saves.

    Attributes:
        row_ids: as given; on the CPU, and no buffer.
        position_of: int32 [vocabulary], a token's place among the rows, -1 where it has none.
        start: [vocabulary, width] on the CPU, or None; no parameter, so that nothing moves or splits it.
        unused: `unused_digest` of the start, or None where it is not kept.
    """

    position_of: Tensor

    def __init__(self, whole: Tensor, row_ids: Tensor, padding_id: int | None, keeps_start: bool) -> None:
        rows = whole.detach()[row_ids.to(whole.device)]
        position_of = torch.full((len(whole),), -1, dtype=torch.int32)
        position_of[row_ids] = torch.arange(len(row_ids), dtype=torch.int32)
        padding = None if padding_id is None else int(position_of[padding_id])
        super().__init__(len(rows), rows.shape[1], padding_idx=padding, _weight=rows)
        self.row_ids = row_ids
        self.start = whole.detach().cpu().clone() if keeps_start else None
        self.unused = None if self.start is None else unused_digest(self.start, row_ids)
        self.register_buffer("position_of", position_of.to(whole.device), persistent=False)
        self.register_load_state_dict_pre_hook(_pick_rows)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """The rows of token ids [...]: [..., width]."""
        if self.num_embeddings != len(self.row_ids):  # transformers resizes an embedding in place
            raise RuntimeError("The vocabulary was resized in a run with an active vocabulary; resize it before.")
        return super().forward(self.position_of[input])


def _pick_rows(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Load the used rows of a whole weight, which saved models have."""
    embedding = cast(ActiveEmbedding, module)
    stored = state_dict.get(f"{prefix}weight")
    if stored is not None and len(stored) == len(embedding.position_of):
        state_dict[f"{prefix}weight"] = stored[embedding.row_ids.to(stored.device)]


def unused_digest(start: Tensor, row_ids: Tensor) -> str | None:
    """Of the rows that no text uses, by which a model that has them is told from others.

    They are rounded to bf16: ZeRO-3 reads them so where it trains so. None where it has read them in fp16, to which
    nothing else would be rounded alike.

    Args:
        start: [vocabulary, width] on the CPU.
        row_ids: of the rows that are used.
    """
    if start.dtype == torch.float16:
        return None
    is_unused = torch.ones(len(start), dtype=torch.bool)
    is_unused[row_ids] = False
    ids, digest = is_unused.nonzero().flatten(), hashlib.sha256()
    for first in range(0, len(ids), ROWS_AT_ONCE):
        rows = start[ids[first : first + ROWS_AT_ONCE]].bfloat16()
        digest.update(rows.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def obstacle_of_optimizer(optim: str) -> str | None:
    """Why rows without a gradient would matter to an optimizer, in words; None for those that know each number alone.

    Adafactor, for one, clips by the mean square over a whole weight, which rows that do not move make smaller.
    """
    if optim in ELEMENTWISE:
        return None
    return (
        f"--optim {optim} is not known to change each weight by its own gradient alone ({', '.join(ELEMENTWISE)} are)"
    )


def obstacle(model: Model) -> str | None:
    """Why a model's embedding must stay whole, in words; None where nothing is against fewer rows."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return f"the input embedding is a {type(embedding).__name__}, which looks its rows up in its own way"
    if not embedding.weight.requires_grad:
        return "the embedding is not trained (--method full trains it)"
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is embedding.weight]
    return f"the input embedding is tied to another layer ({', '.join(names)})" if len(names) > 1 else None


def used_ids(
    datasets: Iterable[Dataset | None], tokenizer: PreTrainedTokenizerBase, embedding: nn.Embedding
) -> Tensor:
    """Which rows of an embedding are used: by the texts, by special tokens, and the one that padding has.

    Args:
        datasets: all rows that the model will see, with `input_ids`.
        tokenizer: of the model.
        embedding: whole; under some strategies its weight is not, so that the weight is not looked at.

    Returns:
        int64 [rows], ascending.

    Raises:
        UserError: the tokenizer gives an id for which there is no row.
    """
    used = np.zeros(embedding.num_embeddings, dtype=bool)
    padding = [] if embedding.padding_idx is None else [embedding.padding_idx]
    _mark(used, np.array([*tokenizer.all_special_ids, *padding], dtype=np.int64))
    for dataset in datasets:
        if dataset is not None:
            for table in dataset.select_columns(["input_ids"]).with_format("arrow").iter(ROWS_AT_ONCE):
                for chunk in table["input_ids"].chunks:
                    _mark(used, chunk.flatten().to_numpy(zero_copy_only=False))
    return torch.from_numpy(np.flatnonzero(used))


def _mark(used: np.ndarray, ids: np.ndarray) -> None:
    if ids.size and ids.max() >= len(used):
        raise UserError(
            f"--model_name_or_path: the tokenizer gives the token id {ids.max()}, the model's embedding has "
            f"{len(used)} rows; they belong to different models."
        )
    used[ids] = True


def active_embedding(model: nn.Module) -> tuple[str, ActiveEmbedding] | None:
    """The name of the weight that has only some rows, and its module; None where all rows are trained."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ActiveEmbedding)]
    return (f"{found[0][0]}.weight", found[0][1]) if found else None


def save_whole_vocabulary(model: nn.Module, folder: str | Path) -> None:
    """Put all rows into the weights that were saved in a folder. A model whose rows are all trained is left alone.

    Call it on one process, beside every `save_pretrained`. A folder without such weights (a checkpoint in shards)
    stays as it is. Where writing fails, the file with some rows goes too: it would look like a model.

    Args:
        model: trained; this process has the embedding's `start`.
        folder: what was saved.

    Raises:
        RuntimeError: the saved weights do not have the rows that were trained.
    """
    active = active_embedding(model)
    path = Path(folder) / WHOLE
    index_path = Path(folder) / INDEX
    if active is None or not (path.exists() or index_path.exists()):
        return
    name, embedding = active
    index = None
    if not path.exists():
        index = json.loads(index_path.read_text(encoding="utf-8"))
        path = path.with_name(index["weight_map"].get(name, "none"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tensors = load_file(path)  # mapped, not read: nothing but the embedding takes memory
        rows = tensors[name]
        tensors[name] = _whole(embedding, rows)
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(path)
        if index is not None:
            index["metadata"]["total_size"] += tensors[name].nbytes - rows.nbytes
            index["metadata"]["total_parameters"] += tensors[name].numel() - rows.numel()
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            temporary.replace(index_path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def _whole(embedding: ActiveEmbedding, rows: Tensor) -> Tensor:
    """[vocabulary, width]: the trained rows among those of the start, in the trained ones' type."""
    assert embedding.start is not None
    if len(rows) != len(embedding.row_ids):
        raise RuntimeError(f"{len(rows)} rows of the embedding were saved, and {len(embedding.row_ids)} are trained.")
    embedding.start[embedding.row_ids] = rows.to(embedding.start.dtype)
    return embedding.start.to(rows.dtype)


def save_row_ids(model: nn.Module, checkpoint: str | Path) -> None:
    """Note in a checkpoint which rows its optimizer's states belong to, and what tells the others. One process, which
    has the embedding's `start`, must call it."""
    active = active_embedding(model)
    if active is None:
        return
    (Path(checkpoint) / ROW_IDS).write_text(json.dumps(active[1].row_ids.tolist()), encoding="utf-8")
    if active[1].unused is not None:
        (Path(checkpoint) / UNUSED).write_text(active[1].unused, encoding="utf-8")


def read_row_ids(checkpoint: str | Path) -> Tensor | None:
    """int64 [rows], the rows of the embedding that a checkpoint trains; None where it trains all."""
    path = Path(checkpoint) / ROW_IDS
    return torch.tensor(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def began_with_others(checkpoint: str | Path, unused: str | None) -> bool:
    """Whether the rows that a checkpoint does not train are known to be none of a model's.

    Args:
        checkpoint: with an active vocabulary, or without.
        unused: the model's `unused_digest` for the same rows; None where it is not known.
    """
    path = Path(checkpoint) / UNUSED
    return unused is not None and path.is_file() and path.read_text(encoding="utf-8") != unused


def row_ids_to_go_on_with(
    checkpoint: str | Path, row_ids: Tensor | None, may_train_all: bool = False
) -> Tensor | None:
    """The rows that a run trains which goes on from a checkpoint: the checkpoint's, whose states it has.

    Args:
        checkpoint: folder to go on from.
        row_ids: that this run's texts use, or None for all.
        may_train_all: where the checkpoint does.

    Returns:
        int64 [rows], ascending, or None for all.

    Raises:
        UserError: the texts use rows that the checkpoint does not train, or only one of the two trains all.
    """
    row_ids_before = read_row_ids(checkpoint)
    before = None if row_ids_before is None else row_ids_before.tolist()
    now = None if row_ids is None else row_ids.tolist()
    if before == now or (before is not None and now is not None and set(now) <= set(before)):
        return row_ids_before
    flag = f"--resume_from_checkpoint {checkpoint}"
    if before is None and may_train_all:
        return None
    if before is None:
        raise UserError(f"{flag}: it trains the whole embedding; add --active_vocabulary off.")
    if now is None:
        raise UserError(
            f"{flag}: it trains {len(before):,} rows of the embedding, and this run all of them. Resume with the same "
            "data and --active_vocabulary on, or start afresh in another --output_dir."
        )
    raise UserError(
        f"{flag}: it trains {len(before):,} rows of the embedding, and {len(set(now) - set(before)):,} tokens of the "
        "data have none among them. They follow from the rows (--train_file, --validation_file, --test_file) and from "
        "--max_length. Give those of its recipe.yaml, or rows without new tokens, or start afresh in another "
        "--output_dir."
    )
