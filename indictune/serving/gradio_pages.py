"""The pages of a demo, in Gradio. An exported demo has a copy of this file, so it imports nothing of indictune."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it is imported, and else reports its use

import gradio as gr
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Received

TEXTS = ["बहुत अच्छी फिल्म थी 😍", "ఈ సినిమా అస్సలు బాగోలేదు", "படம் பரவாயில்லை, பாடல்கள் அருமை", "yeh movie bilkul bakwas hai 😡"]
PAIRS = [("यह फिल्म बहुत अच्छी थी", "फिल्म खराब थी"), ("படம் நன்றாக இருந்தது", "படம் எனக்குப் பிடித்தது")]
LONGEST = 10_000  # characters of a text or a message
LONGEST_CONVERSATION = 100_000
MOST_MESSAGES = 100
MAX_REQUEST_BYTES = 1_000_000
MESSAGES = ["आप कैसे हैं?", "Write a sentence about the rain.", "பொங்கல் என்றால் என்ன?"]
LANGUAGES = {
    "hi": "Hindi",
    "bn": "Bengali",
    "pa": "Punjabi",
    "gu": "Gujarati",
    "or": "Odia",
    "ta": "Tamil",
    "te": "Telugu",
    "kn": "Kannada",
    "ml": "Malayalam",
    "ur": "Urdu",
    "en": "English",
    "und-Latn": "Latin letters, not English",
    "und": "unknown",
}


class Answer(NamedTuple):
    """What a classifier says about a text; the label is empty, and the scores are None, for a text without words."""

    label: str
    scores: dict[str, float] | None
    language: str


Message = dict[str, str]
Classify = Callable[..., Answer]  # of a text, or of the two texts of a pair
Reply = Callable[[list[Message]], Iterator[str]]


class SmallRequests:
    """ASGI middleware that refuses requests of more than `MAX_REQUEST_BYTES`: Gradio reads any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = 0

        async def counted() -> Received:
            nonlocal number
            message = await receive()
            number += len(message.get("body", b""))
            if number > MAX_REQUEST_BYTES:
                raise HTTPException(413, headers={"Connection": "close"})  # the rest is not read
            return message

        await self._app(scope, counted, send)


# Of the server of a page: no page needs files, which Gradio keeps, nor a history of what was typed.
SERVER: dict[str, Any] = {
    "max_file_size": 1,
    "run_history": False,
    "footer_links": ["api", "settings"],
    "app_kwargs": {"middleware": [Middleware(SmallRequests)]},
}


def _check_length(text: str) -> None:
    """Refuse a longer text: the page's own limit is the browser's alone."""
    if len(text) > LONGEST:
        raise gr.Error(f"This has {len(text):,} characters. At most {LONGEST:,} are read.", print_exception=False)


def classifier_page(title: str, classify: Classify, pairs: bool = False) -> gr.Blocks:
    """A page that labels a text, or a pair of texts."""

    def shown(*texts: str) -> tuple[str, dict[str, float] | None, str]:
        for text in texts:
            _check_length(text)
        found = classify(*texts)
        return found.label or "(no words)", found.scores, LANGUAGES.get(found.language, found.language)

    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# {title}")
        with gr.Row():
            with gr.Column():
                texts = [gr.Textbox(label="Text", lines=4, max_length=LONGEST, autofocus=True)]
                if pairs:
                    texts.append(gr.Textbox(label="Second text", lines=4, max_length=LONGEST))
                button = gr.Button("Label it", variant="primary")
                gr.Examples([list(each) for each in PAIRS] if pairs else [[each] for each in TEXTS], texts)
            with gr.Column():
                label = gr.Textbox(label="Label", interactive=False)
                scores = gr.Label(label="Scores", show_heading=False)
                language = gr.Textbox(label="Language", interactive=False)
        events = [button.click, *(each.submit for each in texts)]
        gr.on(events, shown, texts, [label, scores, language], api_name="predict")
    return page


def chat_page(title: str, reply: Reply) -> gr.Blocks:
    """A page to talk to a language model. `reply` gives the answer to a conversation so far, longer and longer."""

    def answered(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
        _check_length(message)
        turns = [{"role": each["role"], "content": plain_text(each["content"])} for each in history]
        if len(turns) > MOST_MESSAGES or sum(len(each["content"]) for each in turns) > LONGEST_CONVERSATION:
            raise gr.Error("This conversation is too long. Begin a new one.", print_exception=False)
        yield from reply([*turns, {"role": "user", "content": message}])

    messages = gr.Chatbot(label=title, buttons=["copy", "copy_all"])  # without the one that publishes a conversation
    settings = {"title": title, "examples": MESSAGES, "analytics_enabled": False}
    page: gr.Blocks = gr.ChatInterface(answered, chatbot=messages, **settings)
    return page


def plain_text(content: Any) -> str:
    """The text of a message, which Gradio may keep in parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")
