"""Active vocabulary: train only the embedding rows that the data uses, and save all rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from indictune.errors import UserError
from indictune.models.load import Model
from indictune.models.trusted_files import INDEX, WHOLE

if TYPE_CHECKING:
    from datasets import Dataset

ROW_IDS = "active_vocabulary.json"  # in a checkpoint: the rows that the optimizer's state belongs to
UNUSED = "active_vocabulary.sha256"  # the digest of the unused rows, which a sharded checkpoint lacks
ROWS_AT_ONCE = 10_000
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")  # values of --optim


class ActiveEmbedding(nn.Embedding):
    """The used rows of an embedding, looked up by the token ids of the whole vocabulary.

    The parameter has the same name as the whole embedding's. A token without a row is an index error. Gradient,
    clipping and optimizer work as with the whole embedding, because unused rows have no gradient there.

    Args:
        whole: [vocabulary, width], the weight that training starts from.
        row_ids: int64 [rows], ascending: which rows are used.
        padding_id: the used row without a gradient, or None.
        keeps_start: keep all rows in CPU memory, because this process saves the model.

    Attributes:
        row_ids: as given; on the CPU, not a buffer.
        position_of: int32 [vocabulary], the row of each token, -1 for none.
        start: [vocabulary, width] on the CPU, or None; not a parameter, so nothing moves or shards it.
        unused: `unused_digest` of the start, or None without it.
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
            raise RuntimeError("The embedding was resized after its active vocabulary was chosen. Resize it before.")
        return super().forward(self.position_of[input])


def _pick_rows(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Load the used rows of a whole weight, as saved models have it."""
    embedding = cast(ActiveEmbedding, module)
    stored = state_dict.get(f"{prefix}weight")
    if stored is not None and len(stored) == len(embedding.position_of):
        state_dict[f"{prefix}weight"] = stored[embedding.row_ids.to(stored.device)]


def unused_digest(start: Tensor, row_ids: Tensor) -> str | None:
    """Digest of the unused rows, which identifies the model that they come from. None for fp16.

    The rows are rounded to bf16, because ZeRO-3 loads them in bf16 if it trains in bf16. It may also load them in
    fp16, which cannot be compared with any other type.
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
    """Why rows without a gradient change what an optimizer does; None if it treats each number alone.

    Adafactor, for example, clips by the mean square over a whole weight, which zero rows make smaller.
    """
    if optim in ELEMENTWISE:
        return None
    return f"--optim {optim} may change a weight by other gradients than its own ({', '.join(ELEMENTWISE)} do not)"


def obstacle(model: Model) -> str | None:
    """Why a model's embedding must stay whole; None if it need not."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return f"the input embedding is a {type(embedding).__name__}, not a plain nn.Embedding"
    if not embedding.weight.requires_grad:
        return "the embedding is not trained (--method full trains it)"
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is embedding.weight]
    return f"the input embedding is tied to another layer ({', '.join(names)})" if len(names) > 1 else None


def used_ids(
    datasets: Iterable[Dataset | None], tokenizer: PreTrainedTokenizerBase, embedding: nn.Embedding
) -> Tensor:
    """The rows of an embedding that texts, special tokens and padding use, int64 [rows], ascending.

    The embedding's weight is not read, because some strategies shard it.

    Raises:
        UserError: `token-id-without-row`.
    """
    used = np.zeros(embedding.num_embeddings, dtype=bool)
    padding = [] if embedding.padding_idx is None else [embedding.padding_idx]
    _mark(used, np.array([*tokenizer.all_special_ids, *padding], dtype=np.int64))
    for dataset in datasets:
        if dataset is not None:
            table = dataset.select_columns(["input_ids"]).with_format("arrow")[:]
            for chunk in table["input_ids"].chunks:
                _mark(used, chunk.flatten().to_numpy(zero_copy_only=False))
    return torch.from_numpy(np.flatnonzero(used))


def _mark(used: np.ndarray, ids: np.ndarray) -> None:
    if ids.size and ids.max() >= len(used):
        details = {"token_id": ids.max(), "rows": len(used)}
        raise UserError("token-id-without-row", "--model_name_or_path", "of this run", **details)
    used[ids] = True


def active_embedding(model: nn.Module) -> tuple[str, ActiveEmbedding] | None:
    """The name of the weight with only the used rows, and its module; None if all rows are trained."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ActiveEmbedding)]
    return (f"{found[0][0]}.weight", found[0][1]) if found else None


def save_whole_vocabulary(model: nn.Module, folder: str | Path) -> None:
    """Put all rows into the weights that `save_pretrained` wrote. Does nothing if all rows are trained.

    Call it after every `save_pretrained`, on one process, which has the embedding's `start`. A sharded checkpoint is
    not changed. If writing fails, the file with only the used rows is removed, because it looks like a model.

    Raises:
        RuntimeError: the saved weights do not have the trained rows.
    """
    active = active_embedding(model)
    path = Path(folder) / WHOLE
    index_path = Path(folder) / INDEX
    if active is None or not (path.exists() or index_path.exists()):
        return
    name, embedding = active
    index: dict[str, Any] = {}
    if not path.exists():
        index = json.loads(index_path.read_text(encoding="utf-8"))
        path = path.with_name(index["weight_map"].get(name, "none"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tensors = load_file(path)  # memory-mapped: only the embedding takes memory
        rows = tensors[name]
        tensors[name] = _whole(embedding, rows)
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(path)
        if index:
            index["metadata"]["total_size"] += tensors[name].nbytes - rows.nbytes
            index["metadata"]["total_parameters"] += tensors[name].numel() - rows.numel()
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            temporary.replace(index_path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def _whole(embedding: ActiveEmbedding, rows: Tensor) -> Tensor:
    """[vocabulary, width]: the trained rows and the unused rows of the start, in the type of the trained rows."""
    assert embedding.start is not None
    if len(rows) != len(embedding.row_ids):
        raise RuntimeError(f"{len(rows)} rows of the embedding were saved, but {len(embedding.row_ids)} are trained.")
    embedding.start[embedding.row_ids] = rows.to(embedding.start.dtype)
    return embedding.start.to(rows.dtype)


def save_row_ids(model: nn.Module, checkpoint: str | Path) -> None:
    """Write the trained rows and the unused rows' digest into a checkpoint, on a process that has the `start`."""
    active = active_embedding(model)
    if active is None:
        return
    (Path(checkpoint) / ROW_IDS).write_text(json.dumps(active[1].row_ids.tolist()), encoding="utf-8")
    if active[1].unused is not None:
        (Path(checkpoint) / UNUSED).write_text(active[1].unused, encoding="utf-8")


def read_row_ids(checkpoint: str | Path) -> Tensor | None:
    """int64 [rows], the rows of the embedding that a checkpoint trains; None for all."""
    path = Path(checkpoint) / ROW_IDS
    return torch.tensor(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def began_with_others(checkpoint: str | Path, unused: str | None) -> bool:
    """Whether a checkpoint's unused rows are known to differ from a model's, by the model's `unused_digest`."""
    path = Path(checkpoint) / UNUSED
    return unused is not None and path.is_file() and path.read_text(encoding="utf-8") != unused


def resumed_row_ids(checkpoint: str | Path, row_ids: Tensor | None, may_train_all: bool = False) -> Tensor | None:
    """The rows that a resumed run trains, or None for all: the checkpoint's, as its optimizer's state has them.

    Args:
        checkpoint: to resume from.
        row_ids: the rows that this run's texts use, or None for all.
        may_train_all: whether this run may train all rows if the checkpoint does.

    Raises:
        UserError: `checkpoint-trains-whole-embedding`, `checkpoint-trains-some-rows` or `checkpoint-lacks-rows`.
    """
    stored, given = read_row_ids(checkpoint), ("--resume_from_checkpoint", checkpoint)
    if stored is None:
        if row_ids is not None and not may_train_all:
            raise UserError("checkpoint-trains-whole-embedding", *given)
        return None
    if row_ids is None:
        raise UserError("checkpoint-trains-some-rows", *given, rows=f"{len(stored):,}")
    missing = len(set(row_ids.tolist()) - set(stored.tolist()))
    if missing:
        raise UserError("checkpoint-lacks-rows", *given, rows=f"{len(stored):,}", missing=f"{missing:,}")
    return stored
