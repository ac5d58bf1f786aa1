"""Two texts that a model reads together: the marks between them, and the token types by which it tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tokenizers import processors

from indictune.data.text.tokenisation import TYPES, Ids, around
from indictune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def read_pairs(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig | None, flag: str = "--model_name_or_path"
) -> None:
    """Let a tokenizer write pairs as the model reads them, here and wherever its files are used.

    It gives token types exactly if the model has embeddings of them. Those of ALBERT give none by themselves
    (transformers 5.23). Where its own template puts nothing between two texts, as Qwen's does, the separator or the
    end token goes between them.

    Raises `UserError` (`pair-without-separator`) if it has neither token, or no template that could be changed. `flag`
    named the model.
    """
    reads_types = (getattr(config, "type_vocab_size", 0) or 0) > 1 or getattr(config, "model_type", "") == "xlnet"
    names = [name for name in tokenizer.model_input_names if name != TYPES] + [TYPES] * reads_types
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    text = "a क"
    bare = cast(Ids, tokenizer(text, add_special_tokens=False)["input_ids"])
    if not bare or around(bare + bare, cast(Ids, tokenizer(text, text)["input_ids"])) is None:
        return
    mark, ends = tokenizer.sep_token or tokenizer.eos_token, around(bare, cast(Ids, tokenizer(text)["input_ids"]))
    if mark is None or ends is None or not tokenizer.is_fast:
        raise UserError("pair-without-separator", flag, tokenizer.name_or_path)
    before, after = (cast(list[str], tokenizer.convert_ids_to_tokens(ids)) for ids in ends)
    tokens = {*before, mark, *after}
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", mark, "$B:1", *after],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in sorted(tokens)],
    )
