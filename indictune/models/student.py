"""A small student of a trained classifier: some of its layers, and the pieces of its vocabulary that texts use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indictune.models.load import load_trained


def layer_numbers(depth: int, count: int) -> list[int]:
    """Evenly spaced numbers of `count` layers out of `depth`, the first and the last among them.

    A student takes such layers of its teacher: Sanh et al., "DistilBERT" (2019), section 3.
    """
    return [int(number) for number in np.linspace(0, depth - 1, count).round()]


def used_vocabulary(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[PreTrainedTokenizerBase, list[int] | None]:
    """A tokenizer of the pieces that cleaned texts use and of single characters, and the teacher's ids in its order.

    It splits the texts as before: WordPiece takes the longest piece that fits, and Unigram (SentencePiece) the
    likeliest split. Other words fall into smaller pieces. A tokenizer of another kind stays whole.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    model = content["model"]
    if model.get("type") not in ("WordPiece", "Unigram") or model.get("byte_fallback"):
        return tokenizer, None
    # The tokens around a text keep their ids, which stand in other files too, and so do all before them.
    kept = {*range(max(*tokenizer("")["input_ids"], tokenizer.pad_token_id or 0) + 1), *tokenizer.all_special_ids}
    kept |= {each["id"] for each in content["added_tokens"]}
    for start in range(0, len(texts), 1_000):
        kept.update(*tokenizer(texts[start : start + 1_000], verbose=False)["input_ids"])
    new = _cut(model, kept)
    content["added_tokens"] = [each | {"id": new[each["id"]]} for each in content["added_tokens"]]
    content |= {"truncation": None, "padding": None}
    settings = ("model_max_length", "model_input_names", "padding_side", "truncation_side")
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        **{name: getattr(tokenizer, name) for name in settings},
        **tokenizer.special_tokens_map,
    )
    return made, list(new)


def _cut(model: dict[str, Any], kept: set[int]) -> dict[int, int]:
    """Leave the kept pieces and single characters in the `model` of a tokenizer.json. Returns old id -> new id."""
    vocabulary, is_unigram = model["vocab"], model["type"] == "Unigram"
    ids = {piece: at for at, (piece, _) in enumerate(vocabulary)} if is_unigram else vocabulary
    pieces, prefix = {at: piece for piece, at in ids.items()}, model.get("continuing_subword_prefix") or ""
    kept = kept | {old for old, piece in pieces.items() if len(piece.removeprefix(prefix)) == 1}
    if is_unigram:  # an unknown character costs ten more than the rarest piece, which therefore stays
        kept.add(min(pieces, key=lambda old: vocabulary[old][1]))
    new = {old: at for at, old in enumerate(sorted(kept))}
    if is_unigram:
        model |= {"vocab": [vocabulary[old] for old in new if old in pieces], "unk_id": new[model["unk_id"]]}
    else:
        model["vocab"] = {pieces[old]: at for old, at in new.items() if old in pieces}
    return new


def write_student(
    teacher: Path, folder: Path, layers: int | None, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> None:
    """Write a student that is ready to train: some layers of the teacher, its head, and the pieces that texts use.

    `tokenizer` is the teacher's; None for `layers` keeps half of them.
    """
    model: Any = load_trained(teacher, device_map="cpu")
    depth = model.config.num_hidden_layers
    _keep_layers(model, layer_numbers(depth, layers or (depth + 1) // 2))
    tokenizer, kept = used_vocabulary(tokenizer, texts)
    if kept is not None:
        whole = model.get_input_embeddings()
        rows = whole.weight.detach()[list(kept)].clone()
        model.set_input_embeddings(nn.Embedding(len(rows), rows.shape[1], whole.padding_idx, _weight=rows))
        model.config.vocab_size = len(kept)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Remove the other layers of a model. ALBERT, whose layers share their weights, has none to remove."""
    depth, config = model.config.num_hidden_layers, model.config
    for name, whole in list(model.named_modules()):
        if isinstance(whole, nn.ModuleList) and len(whole) == depth:
            around, _, own = name.rpartition(".")
            setattr(model.get_submodule(around), own, nn.ModuleList(whole[number] for number in layers))
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth and "layer" in name:  # such as ModernBERT's layer_types
            setattr(config, name, [value[number] for number in layers])
    config.num_hidden_layers = len(layers)
