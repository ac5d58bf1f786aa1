"""A small student of a trained classifier: some of its layers, and the pieces of its vocabulary that texts use."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indictune.models.load import POSITIONS_AFTER_PADDING, load_trained

logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 1_000


def layer_numbers(depth: int, count: int) -> list[int]:
    """Evenly spaced numbers of `count` layers out of `depth`, the first and the last among them.

    A student takes such layers of its teacher: Sanh et al., "DistilBERT" (2019), section 3.
    """
    return [int(number) for number in np.linspace(0, depth - 1, count).round()]


def used_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, texts: Iterable[str]
) -> tuple[PreTrainedTokenizerBase, list[int]] | None:
    """A tokenizer of the pieces that texts use and of single characters, and the teacher's ids of its tokens in order.

    It splits the texts as before: WordPiece takes the longest piece that fits, and Unigram (SentencePiece) the
    likeliest split. Other words fall into smaller pieces. None for a tokenizer of another kind.

    `tokenizer` and `config` are the teacher's; `texts` are cleaned, and read three times. Logs what it finds.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    model = content["model"]
    if model.get("type") not in ("WordPiece", "Unigram") or model.get("byte_fallback"):
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    kept = {each for ids in _ids_of(backend, texts) for each in ids} | {each["id"] for each in content["added_tokens"]}
    if config.model_type in POSITIONS_AFTER_PADDING:  # its id says where positions begin
        kept |= set(range(config.pad_token_id + 1))
    new = _cut(model, kept)
    content["added_tokens"] = [each | {"id": new[each["id"]]} for each in content["added_tokens"]]
    content |= {"post_processor": _renumbered(content["post_processor"], new), "truncation": None, "padding": None}
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        **tokenizer.special_tokens_map,
    )
    both = zip(_ids_of(backend, texts), _ids_of(made.backend_tokenizer, texts), strict=True)
    alike = [[new[each] for each in before] == after for before, after in both]
    pieces = f"{len(new):,} of {len(tokenizer):,} pieces"
    logger.info("the student has %s, which split %d of %d texts as its teacher does", pieces, sum(alike), len(alike))
    return made, list(new)


def _ids_of(backend: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    rest = iter(texts)
    while some := list(islice(rest, _TEXTS_AT_ONCE)):
        yield from (each.ids for each in backend.encode_batch_fast(some))


def _cut(model: dict[str, Any], used: set[int]) -> dict[int, int]:
    """Leave the used pieces and single characters in the `model` of a tokenizer.json. Returns old id -> new id."""
    vocabulary, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
    if model["type"] == "Unigram":
        # An unknown character costs ten more than the rarest piece, which therefore stays.
        kept = used | {model["unk_id"], min(range(len(vocabulary)), key=lambda at: vocabulary[at][1])}
        kept |= {at for at, (piece, _) in enumerate(vocabulary) if len(piece) == 1}
        new = {old: at for at, old in enumerate(sorted(kept))}
        model |= {"vocab": [each for at, each in enumerate(vocabulary) if at in new], "unk_id": new[model["unk_id"]]}
    else:
        kept = used | {vocabulary[model["unk_token"]]}
        kept |= {at for piece, at in vocabulary.items() if len(piece.removeprefix(prefix)) == 1}
        new = {old: at for at, old in enumerate(sorted(kept))}
        model["vocab"] = {piece: new[at] for piece, at in vocabulary.items() if at in new}
    return new


def _renumbered(part: Any, new: Mapping[int, int]) -> Any:
    """A part of tokenizer.json with other ids of tokens: those in `ids`, and in pairs such as `["[SEP]", 102]`."""
    if isinstance(part, dict):
        return {
            name: [new[each] for each in value] if name == "ids" else _renumbered(value, new)
            for name, value in part.items()
        }
    if isinstance(part, list):
        is_pair = len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int)
        return [part[0], new[part[1]]] if is_pair else [_renumbered(each, new) for each in part]
    return part


def write_student(
    teacher: Path, folder: Path, layers: Sequence[int], tokenizer: PreTrainedTokenizerBase, kept: Sequence[int] | None
) -> None:
    """Write a student that is ready to train: some layers of the teacher, its head, and the `kept` embedding rows.

    None for `kept` keeps all rows.
    """
    model: Any = load_trained(teacher, device_map="cpu")
    _keep_layers(model, layers)
    if kept is not None:
        _keep_rows(model, kept)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    load_trained(folder, device_map="cpu")  # it refuses weights that do not fit


def _keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Remove the other layers of a model. ALBERT, whose layers share their weights, has none to remove."""
    depth, config = model.config.num_hidden_layers, model.config
    stacks = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == depth]
    for name in stacks if len(layers) < depth else ():
        around, _, own = name.rpartition(".")
        whole = model.get_submodule(name)
        setattr(model.get_submodule(around), own, nn.ModuleList(whole[number] for number in layers))
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth and "layer" in name:
            setattr(config, name, [value[number] for number in layers])
    config.num_hidden_layers = len(layers)


def _keep_rows(model: Any, kept: Sequence[int]) -> None:
    """Keep some rows of the embedding, in this order, and give the configuration the new ids of its tokens."""
    whole, new = model.get_input_embeddings(), {old: at for at, old in enumerate(kept)}
    padding = None if whole.padding_idx is None else new.get(whole.padding_idx)
    rows = whole.weight.detach()[list(kept)].clone()
    model.set_input_embeddings(nn.Embedding(len(rows), rows.shape[1], padding, _weight=rows))
    for name, value in vars(model.config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(model.config, name, new.get(value))
    model.config.vocab_size = len(kept)
