"""`indictune demo`: a page to try a finished run's model on, here or as a Space."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from indictune.commands.serve import ShownModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import ClassifierArguments, flag
from indictune.errors import Problems, problem
from indictune.prediction.chat_model import ChatModel, TooLongError, open_chat_model
from indictune.prediction.labelled_rows import as_records, label, text_batch
from indictune.prediction.served_classifier import Classifier, load_served_classifier
from indictune.serving import gradio_pages
from indictune.serving.gradio_pages import Answer, Classify, Message, Reply
from indictune.serving.space_folder import holds_language_model, write_space
from indictune.versions import check_extra


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


@dataclass
class DemoFlags(ShownModelArguments):
    """Which finished model is shown on a page, and where."""

    needed = ("model", "indictune demo FOLDER, where FOLDER is the --output_dir of a finished run.")

    port: int = flag(7860, "Port to listen on; 0 takes a free one.")
    export: str | None = flag(
        None, "Write a folder that a Space of the Hub runs, instead of starting the page. Must not exist, or be empty."
    )
    max_new_tokens: int | None = flag(None, "Most tokens of an answer of a language model. Default: 256.")
    temperature: float | None = flag(
        None, "How a language model draws tokens: 0, the default, takes the likeliest one. 1 is usual."
    )

    @property
    def of_answers(self) -> dict[str, Any]:
        """The flags of a language model on this machine that are given."""
        given = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


def run_demo(flags: Mapping[str, list[str]]) -> int:
    """Show a model on a page until a signal ends it, or write the page as a Space."""
    args = read_arguments(flags, DemoFlags, "model")
    check_extra("demo", "demo", "gradio")
    if args.export is not None or not holds_language_model(Path(args.model)):
        other = "a classifier" if args.export is None else "--export"
        given = [(f"--{name}", value) for name, value in args.of_answers.items()]
        Problems(problem("no-effect", *each, other=other) for each in given).raise_any()
    if args.export is not None:
        write_space(Path(args.model), Path(args.export))
        print(f"Written to {args.export}. To publish it: hf upload you/{args.name} {args.export} --repo-type space")
        return 0
    from indictune.serving.server import bound, run_server

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    page = problems.attempt(demo_app, args)
    problems.raise_any()
    assert listener is not None
    assert page is not None
    with listener:
        run_server(page, listener, lambda url: f"{args.name} is on {url}. Ctrl-C stops it.")
    return 0


def demo_app(args: DemoFlags) -> Any:
    """The application for the kind of model in the folder; a `UserError` with every problem of the model."""
    from fastapi import FastAPI
    from gradio import mount_gradio_app

    trust: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, "trust_checkpoint": args.trust_checkpoint}
    if holds_language_model(Path(args.model)):
        model = open_chat_model(args.model, **args.of_answers, **trust)
        blocks = gradio_pages.chat_page(args.name, reply_with(model))
    else:
        classifier = load_served_classifier(ClassifierArguments(args.model, **trust))
        blocks = gradio_pages.classifier_page(args.name, classify_with(classifier))
    footer, most = ["api", "settings"], gradio_pages.MAX_FILE_BYTES
    return mount_gradio_app(FastAPI(), blocks, "/", footer_links=footer, run_history=False, max_file_size=most)
