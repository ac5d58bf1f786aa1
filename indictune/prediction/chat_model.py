"""A trained language model in a conversation, with the template that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, TextStreamer

from indictune.config.arguments import ModelArguments
from indictune.data.chat.chat_tokens import PLAIN, answer_ends, choose_template, prompt_ids
from indictune.data.chat.messages import Message
from indictune.errors import UserError
from indictune.files import json_or_nothing
from indictune.models import load
from indictune.models.adapters import config_file, continues_texts
from indictune.models.config_shapes import KINDS
from indictune.models.load import Model


class TooLongError(Exception):
    """A message leaves no room for an answer. The conversation is as before."""


@dataclass
class ChatModel:
    """A model in a conversation."""

    model: Model
    tokenizer: PreTrainedTokenizerBase
    template: str  # writes messages as they were in training
    settings: GenerationConfig  # how tokens are drawn, and which ones end an answer
    max_new_tokens: int
    positions: int | None  # tokens that the model can read; None for no limit
    messages: list[Message]  # so far, of user and assistant by turns

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """The answer to a message; `show` gets it piece by piece, as soon as a word is complete.

        Raises:
            TooLongError: the message leaves no room for an answer.
        """
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt()
        room = self.max_new_tokens if self.positions is None else self.positions - len(prompt)
        longest = min(self.max_new_tokens, room)
        if longest < 1:
            self.messages.pop()
            raise TooLongError(f"The message has {len(prompt)} tokens, and the model reads {self.positions}.")
        self.settings.max_new_tokens = longest
        ids, model = torch.tensor([prompt], device=self.model.device), cast(Any, self.model)
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self.settings,
            streamer=_Pieces(self.tokenizer, show),
        )
        answer = str(self.tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": answer})
        if self.template == PLAIN:  # rows of one prompt and one completion
            self.messages.clear()
        return answer

    def _prompt(self) -> list[int]:
        """Tokens of the conversation. Where it grows too long, its oldest turns are left out."""
        room = None if self.positions is None else self.positions - self.max_new_tokens
        while True:
            prompt = prompt_ids([*self.messages, {"role": "assistant", "content": ""}], self.tokenizer, self.template)
            if room is None or len(prompt) <= room or len(self.messages) == 1:
                return prompt
            del self.messages[:2]


class _Pieces(TextStreamer):
    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._show(text)


def open_chat_model(
    model: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> ChatModel:
    """The model of a folder, ready to answer, on a GPU where there is one. Arguments as of `indictune chat`.

    Raises:
        UserError: the folder holds no language model, or it cannot be read; or as `choose_template`.
    """
    check_language_model(model)
    named = ModelArguments(model, trust_remote_code=trust_remote_code)
    config = load.trained_config(named)
    tokenizer = load.load_tokenizer(named, flag="--model")
    choose_template(tokenizer, chat_template, as_written=False, train_on_prompts=True)  # before weights are read
    loaded = load_language_model(named, config, tokenizer)
    return chat_with(loaded, tokenizer, max_new_tokens, temperature, chat_template)


def chat_with(
    loaded: Model,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    chat_template: str | None = None,
) -> ChatModel:
    """A language model in memory, ready to answer where it is. Arguments and errors as of `open_chat_model`."""
    template = choose_template(tokenizer, chat_template, as_written=False, train_on_prompts=True)
    base = load.without_adapter(loaded)
    own = base.generation_config.eos_token_id
    ends = {*answer_ends(tokenizer, template), *(own if isinstance(own, list) else [own])} - {None}
    drawn = {"temperature": temperature} if temperature > 0 else {}
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=temperature > 0, **drawn, eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id
    )
    base.generation_config = settings  # `generate` would fill gaps from the saved one
    return ChatModel(loaded, tokenizer, template, settings, max_new_tokens, load.positions_of(base.config), [])


def load_language_model(named: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Model:
    """The weights of a folder, on a GPU where there is one; a `UserError` if they do not fit the tokenizer."""
    has_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if has_gpu else cast(torch.dtype, config.dtype or torch.float32)
    where = "auto" if has_gpu else None
    model = load.load_trained(named.model_name_or_path, named.trust_remote_code, where, KINDS["ForCausalLM"][0], dtype)
    load.check_vocabulary(named, model, tokenizer, flag="--model")
    return model.eval()


def check_language_model(folder: str) -> None:
    """Refuse a folder without a finished language model."""
    if not config_file(folder).is_file():
        raise UserError("no-model", "--model", folder)
    architectures = json_or_nothing(config_file(folder)).get("architectures")
    if architectures and not continues_texts(architectures):
        raise UserError("no-language-model", "--model", Path(folder), found=architectures[0])
