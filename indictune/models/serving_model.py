"""Make a trained model ready to serve: a tokenizer that cleans and cuts, packed weights, a shorter last layer."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from indictune.data.text.cleaning import (
    BREAKS,
    HANDLE,
    HANDLE_PLACEHOLDER,
    INVISIBLE,
    LETTER_OF_TAG,
    TOUCHING,
    URL,
    URL_PLACEHOLDER,
    WORD,
    clean,
)
from indictune.files import write_json, write_whole
from indictune.models.load import positions_of
from indictune.upstream import packed_linear, packed_weight

logger = logging.getLogger(__name__)

# Each stands for a replaced match until its surroundings are spaced. No text has these private characters.
_URL, _TAG, _HANDLE = "\U0010fff0", "\U0010fff1", "\U0010fff2"
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&#39;": "'", "&#039;": "'", "&nbsp;": " "}
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")

_HASH = rf"[#＃]{LETTER_OF_TAG}"
_IN_WORD = f"[{WORD}]"
# A character that gets a space between itself and a placeholder.
_APART = f"[^{''.join(map(re.escape, sorted(TOUCHING)))}]".replace("&", r"\&")


def cleaning_steps() -> list[normalizers.Normalizer]:
    """The steps of `clean`, in their order."""
    return [
        _replace(BREAKS.pattern, " "),
        _replace(INVISIBLE.pattern, ""),
        _replace("&(?:amp;)+", "&"),
        *(normalizers.Replace(entity, character) for entity, character in _ENTITIES.items()),
        normalizers.NFC(),
        _replace(f"(?i){URL.pattern}", _URL),
        *_placed(_URL, URL_PLACEHOLDER),
        *_hashtags(),
        _replace(HANDLE.pattern, _HANDLE),
        *_placed(_HANDLE, HANDLE_PLACEHOLDER),
        _replace(r"\s+", " "),
        normalizers.Strip(),
    ]


def _hashtags() -> list[normalizers.Normalizer]:
    """Hashtags become their words. `\\K` keeps what was matched before it, and `\\G` is the end of the last match."""
    return [
        _replace(rf"(?<![{WORD}&/]){_HASH}", _TAG),
        _replace(rf"{_TAG}(?>(?:{_IN_WORD}|{_HASH})*)\K(?={_APART})", " "),
        _replace(rf"(?:{_TAG}|\G(?!\A))(?:(?!_){_IN_WORD})*\K(?:_|{_HASH})", " "),
        _replace(rf"(?<={_APART}){_TAG}", " "),
        normalizers.Replace(_TAG, ""),
    ]


def _placed(mark: str, placeholder: str) -> list[normalizers.Normalizer]:
    """The placeholder at each mark, with a space on each side where a word or an emoji touches it."""
    before, after = _replace(rf"(?<={_APART}){mark}", f" {mark}"), _replace(rf"{mark}(?={_APART})", f"{mark} ")
    return [before, after, normalizers.Replace(mark, placeholder)]


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    # Rust's texts have no halves of surrogate pairs. A mark is no letter in Python, and part of a word in Oniguruma.
    pattern = pattern.replace(r"\ud800-\udfff", "").replace(r"[^\W\d_]", r"[\p{L}\p{Nl}\p{No}]")
    escaped = _ESCAPE.sub(lambda found: rf"\x{{{found[1] or found[2] or found[3]}}}", pattern)
    return normalizers.Replace(Regex(escaped), content)


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
    folder: Path, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int, pairs: bool = False
) -> None:
    """Let the tokenizer saved in a folder clean texts, and cut them to `max_length` tokens, special ones included.

    With `pairs`, the model reads pairs of texts.

    transformers cuts only where it is asked to (`truncation=True`). Otherwise a long text would have more tokens than
    the model has positions, which ends in a crash: such a text is cut by its characters.

    A tokenizer that cannot clean stays as it was, and gets the length alone.
    """
    settings_file, backend_file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) | {"model_max_length": max_length}
    if backend_file.is_file():
        own = backend_file.read_text(encoding="utf-8")
        backend = json.loads(own)
        steps = [*cleaning_steps(), *_cut(backend, tokenizer, config, max_length, pairs)]
        backend["normalizer"] = _before(backend["normalizer"], steps)
        side = tokenizer.truncation_side.capitalize()
        backend["truncation"] = {"direction": side, "max_length": max_length, "strategy": "LongestFirst", "stride": 0}
        write_whole(backend_file, json.dumps(backend, ensure_ascii=False))  # without indents, which take a second
        plain = {"tokenizer_class": PLAIN_CLASS, "model_input_names": tokenizer.model_input_names}
        write_json(settings_file, settings | plain)
        if _cleans(folder, tokenizer, max_length, pairs):
            return
        backend_file.write_text(own, encoding="utf-8")
    write_json(settings_file, settings)
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
    backend: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int, pairs: bool
) -> list[normalizers.Normalizer]:
    """The step that keeps a text within the model's positions, if a token has at least one character.

    A text of a pair keeps within half of them.
    """
    positions, model = positions_of(config), backend["model"]
    if positions is None or model["type"] not in ("WordPiece", "Unigram") or model.get("byte_fallback"):
        return []
    # A word of Unigram's has a token for its space.
    characters = (positions - tokenizer.num_special_tokens_to_add(pairs)) // (1 + pairs) - (model["type"] == "Unigram")
    if characters < _LEAST_CHARACTERS_PER_TOKEN * max_length:
        return []
    each = "." if model["type"] == "Unigram" else " ?[^ ]"
    return [_replace(rf"(?m)\A(?>(?:{each}){{{characters}}})\K.+", "")]  # drops what follows them


def _cleans(folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, pairs: bool) -> bool:
    """Whether the saved tokenizer makes of raw texts what the training's makes of cleaned ones."""
    saved = AutoTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": max_length}
    probes = [list(_PROBES), *([list(_PROBES[::-1])] if pairs else [])]
    raw, cleaned = saved(*probes, **cut), tokenizer(*([clean(text) for text in each] for each in probes), **cut)
    return dict(raw) == dict(cleaned)


# ALBERT uses one layer again and again. The layers of others add the attention of all tokens to their states.
TYPES = ("bert", "roberta", "xlm-roberta")


def read_first_tokens(model: Any) -> None:
    """Shorten the last layer of a model of `TYPES`, which then gives [rows, 1, width]."""
    last = model.base_model.encoder.layer[-1]
    last.attention = _FirstTokenAttention(last.attention)


class _FirstTokenAttention(nn.Module):
    """The attention of BERT's last layer, with queries of first tokens alone."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.of_all, self.output = whole.self, whole.output

    def forward(
        self, states: torch.Tensor, *_: Any, cu_seq_lens_q: torch.Tensor, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """The states of first tokens, [rows, 1, width], and None in place of weights.

        Args:
            states: [1, tokens, width].
            cu_seq_lens_q: the start of each row, and the end of the last one, int [rows + 1].
        """
        first = states[0, cu_seq_lens_q[:-1]]
        heads = (-1, self.of_all.num_attention_heads, self.of_all.attention_head_size)
        query = self.of_all.query(first).view(heads)
        key, value = (of(states[0]).view(heads) for of in (self.of_all.key, self.of_all.value))
        attended = _attended(query, key, value, cu_seq_lens_q.diff(), self.of_all.scaling)
        return self.output(attended.flatten(1), first)[:, None], None


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of one query a row, [rows, heads, width].

    Args:
        query: [rows, heads, width].
        key: [tokens, heads, width]; `value` likewise.
        lengths: tokens of each row, int [rows].
        scaling: of the scores.
    """

    def reduced(values: torch.Tensor, how: str) -> torch.Tensor:
        # `unsafe` skips a check of the lengths, which waits for the GPU.
        return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)

    row_of = torch.repeat_interleave(lengths, output_size=len(key))
    scores = (query.float()[row_of] * key).sum(-1) * scaling  # [tokens, heads]
    powers = (scores - reduced(scores, "max")[row_of]).exp()
    shares = powers / reduced(powers, "sum")[row_of]
    return reduced(shares[..., None] * value, "sum").to(value.dtype)


# oneDNN compiles code for each number of tokens, and keeps it: hundreds of MB without this.
_MULTIPLE = 64


def can_pack(model: nn.Module) -> bool:
    """Whether a model is on the CPU in fp32, and torch was built with oneDNN."""
    kinds = {(each.device.type, each.dtype) for each in model.parameters()}
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and kinds == {("cpu", torch.float32)}


def pack_weights(model: Any) -> None:
    """Replace all linear layers, if `can_pack`. The model then has no weights to train or to save."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                setattr(module, name, _PackedLinear(layer))
    if model.config.model_type in TYPES and model.config.hidden_act == "gelu":
        for layer in model.base_model.encoder.layer:
            layer.intermediate.dense.activation = "gelu"
            layer.intermediate.intermediate_act_fn = nn.Identity()


class _PackedLinear(nn.Module):
    activation = "none"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = packed_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """From [..., in_features] to [..., out_features]."""
        rows = states.flatten(0, -2)
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE))
        found = packed_linear(filled, self.weight, self.bias, self.activation)
        return found[: len(rows)].view(*states.shape[:-1], -1)
