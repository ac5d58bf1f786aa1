"""A language model to talk to on a page. `model/` has its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from indictune.serving.gradio_pages import SERVER, Message, Reply, chat_page

MAX_NEW_TOKENS = 256
_TIMEOUT_S = 120.0  # after which an answer is given up


def replying(folder: Path) -> Reply:
    """Answers a conversation by the template of the training."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    positions = getattr(model.config, "max_position_embeddings", None)

    def prompt_of(messages: list[Message]) -> Any:
        """Tokens of the conversation, without its oldest turns where it is too long."""
        while True:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            fits = positions is None or prompt["input_ids"].shape[1] + MAX_NEW_TOKENS <= positions
            if fits or len(messages) == 1:
                return prompt
            messages = messages[2:]

    def reply(messages: list[Message]) -> Iterator[str]:
        prompt = prompt_of(messages)
        room = MAX_NEW_TOKENS if positions is None else min(MAX_NEW_TOKENS, positions - prompt["input_ids"].shape[1])
        if room < 1:
            yield "(the message is too long for this model)"
            return
        pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=_TIMEOUT_S, skip_special_tokens=True)
        settings = {**prompt, "streamer": pieces, "max_new_tokens": room, "do_sample": False}
        Thread(target=model.generate, kwargs=settings, daemon=True).start()
        said = ""
        for piece in pieces:
            said += piece
            yield said

    return reply


if __name__ == "__main__":
    chat_page("TITLE", replying(Path(__file__).with_name("model"))).launch(**SERVER)
