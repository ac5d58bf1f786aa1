"""Save a tokenizer that cleans and cuts texts as training did, for programs without this package."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from indictune.data.cleaning import clean
from indictune.models.position_limits import positions_of
from indictune.models.serving_normalizer import cleaning_steps, cut_after

logger = logging.getLogger(__name__)

# A class of transformers 4 and 5 that takes the normalizer of tokenizer.json as it is. Others build their own (5.23).
PLAIN_CLASS = "PreTrainedTokenizerFast"
# A text is cut by characters only where no text loses tokens that training saw: they have fewer than three characters.
_LEAST_CHARACTERS_PER_TOKEN = 3
_PROBES = (
    "क्या फिल्म थी!😍 #मस्त_फिल्म #ok😂 @someone_1 https://t.co/abc है &amp; बस",
    "సినిమా\u200bబాగుంది  @ab\nwww.example.com/a(b) #నచ్చింది!",
    "படம்\u00a0மோசம் &lt;3 &quot;worst&quot; 😂@user http://a.b/😂 a@b.com #100",
)


def serve_as_trained(
    folder: Path, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int
) -> None:
    """Let the tokenizer saved in a folder clean texts, and cut them to `max_length` tokens.

    transformers cuts only where it is asked to (`truncation=True`). Otherwise a long text would have more tokens than
    the model has positions, which ends in a crash: such a text is cut by its characters.

    A tokenizer that cannot clean stays as it was, and gets the length alone.

    Args:
        folder: holds the saved tokenizer.
        tokenizer: of the training, which was given cleaned texts.
        config: of the model.
        max_length: of the training, special tokens included.
    """
    settings_file, backend_file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) | {"model_max_length": max_length}
    if backend_file.is_file():
        own = backend_file.read_text(encoding="utf-8")
        backend = json.loads(own)
        steps = [*cleaning_steps(), *_cut(backend, tokenizer, config, max_length)]
        backend["normalizer"] = _before(backend["normalizer"], steps)
        side = tokenizer.truncation_side.capitalize()
        backend["truncation"] = {"direction": side, "max_length": max_length, "strategy": "LongestFirst", "stride": 0}
        _write(backend_file, backend)
        plain = {"tokenizer_class": PLAIN_CLASS, "model_input_names": tokenizer.model_input_names}
        _write(settings_file, settings | plain)
        if _cleans(folder, tokenizer, max_length):
            return
        backend_file.write_text(own, encoding="utf-8")
    _write(settings_file, settings)
    logger.warning("The saved tokenizer cannot clean texts itself. Give it the output of `clean` (docs/predict.md).")


def without_cleaning(tokenizer: PreTrainedTokenizerBase) -> None:
    """Take the steps of `serve_as_trained` out of a tokenizer, which is faster for texts that are cleaned already."""
    normalizer: Any = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    if not isinstance(normalizer, normalizers.Sequence):
        return
    first = json.loads(normalizer.__getstate__())["normalizers"][0]
    if first.get("normalizers", [None])[0] == _as_json(cleaning_steps())["normalizers"][0]:
        own = [normalizer[index] for index in range(1, len(normalizer))]
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(own)


def _before(own: dict[str, Any] | None, steps: list[normalizers.Normalizer]) -> dict[str, Any]:
    """A normalizer that cleans before the tokenizer's own, from which the steps of an earlier training are removed."""
    ours = _as_json(steps)
    of_own = [] if own is None else own.get("normalizers", [own])
    if of_own and of_own[0].get("normalizers", [None])[0] == ours["normalizers"][0]:
        of_own = of_own[1:]
    return {"type": "Sequence", "normalizers": [ours, *of_own]}


def _as_json(steps: list[normalizers.Normalizer]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(normalizers.Sequence(steps).__getstate__())
    return state


def _cut(
    backend: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int
) -> list[normalizers.Normalizer]:
    """The step that keeps a text within the model's positions, if a token has at least one character."""
    positions, model = positions_of(config), backend["model"]
    if positions is None or model["type"] not in ("WordPiece", "Unigram") or model.get("byte_fallback"):
        return []
    # A word of Unigram's has a token for its space.
    characters = positions - tokenizer.num_special_tokens_to_add() - (model["type"] == "Unigram")
    if characters < _LEAST_CHARACTERS_PER_TOKEN * max_length:
        return []
    return [cut_after(characters, counts_spaces=model["type"] == "Unigram")]


def _cleans(folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> bool:
    """Whether the saved tokenizer makes of raw texts what the training's makes of cleaned ones."""
    saved = AutoTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": max_length}
    raw, cleaned = saved(list(_PROBES), **cut), tokenizer([clean(text) for text in _PROBES], **cut)
    return dict(raw) == dict(cleaned)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
