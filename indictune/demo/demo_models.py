"""What the pages of `indictune demo` ask: a finished run's model, as `predict` and `chat` use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue

from indictune.demo.gradio_pages import Answer, Classify, Message, Reply
from indictune.prediction.chat_model import ChatModel, TooLongError
from indictune.prediction.labelled_rows import as_records, label, text_batch
from indictune.prediction.served_classifier import Classifier


def classify_with(classifier: Classifier) -> Classify:
    """Labels a text as `indictune predict` does."""

    def classify(text: str) -> Answer:
        (row,) = as_records(label(classifier, text_batch([text])))
        given = row["label"]
        if given is None:
            return Answer("", None, row["language"])
        name = ", ".join(given) or "none" if isinstance(given, list) else str(given)
        return Answer(name, row.get("scores"), row["language"])

    return classify


def reply_with(model: ChatModel) -> Reply:
    """Answers a conversation as `indictune chat` does. One answer is made at a time."""
    one_at_a_time = threading.Lock()

    def reply(messages: list[Message]) -> Iterator[str]:
        pieces: SimpleQueue[str | None] = SimpleQueue()

        def answer() -> None:
            try:
                with one_at_a_time:
                    replace(model, messages=messages[:-1]).answer(messages[-1]["content"], pieces.put)
            except TooLongError as error:
                pieces.put(str(error))
            finally:
                pieces.put(None)

        threading.Thread(target=answer, daemon=True).start()
        said = ""
        while (piece := pieces.get()) is not None:
            said += piece
            yield said
        if not said:
            yield "(the model ended its answer at once)"

    return reply
