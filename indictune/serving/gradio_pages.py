"""The pages of a demo, in Gradio. An exported demo has a copy of this file, so it imports nothing of indictune."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it is imported, and else reports its use

import gradio as gr

TEXTS = ["बहुत अच्छी फिल्म थी 😍", "ఈ సినిమా అస్సలు బాగోలేదు", "படம் பரவாயில்லை, பாடல்கள் அருமை", "yeh movie bilkul bakwas hai 😡"]
MAX_FILE_BYTES = 1  # no page needs files, and Gradio keeps uploads
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
Classify = Callable[[str], Answer]
Reply = Callable[[list[Message]], Iterator[str]]


def classifier_page(title: str, classify: Classify, longest: int = 10_000) -> gr.Blocks:
    """A page that labels a text of at most `longest` characters."""

    def shown(text: str) -> tuple[str, dict[str, float] | None, str]:
        found = classify(text)
        return found.label or "(no words)", found.scores, LANGUAGES.get(found.language, found.language)

    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# {title}")
        with gr.Row():
            with gr.Column():
                text = gr.Textbox(label="Text", lines=4, max_length=longest, autofocus=True)
                button = gr.Button("Label it", variant="primary")
                gr.Examples([[each] for each in TEXTS], text)
            with gr.Column():
                label = gr.Textbox(label="Label", interactive=False)
                scores = gr.Label(label="Scores", show_heading=False)
                language = gr.Textbox(label="Language", interactive=False)
        gr.on([button.click, text.submit], shown, text, [label, scores, language], api_name="predict")
    return page


def chat_page(title: str, reply: Reply) -> gr.Blocks:
    """A page to talk to a language model. `reply` gives the answer to a conversation so far, longer and longer."""

    def answered(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
        turns = [{"role": each["role"], "content": plain_text(each["content"])} for each in history]
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
