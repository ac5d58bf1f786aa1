"""`indictune demo`: a page to try a finished run's model on, here or as a Space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indictune.config.recipe import read_arguments
from indictune.config.serving_arguments import DemoArguments
from indictune.errors import Problems, problem
from indictune.versions import check_extra


def demo_command(argv: Sequence[str]) -> int:
    """`indictune demo FOLDER [--export F]`; returns the exit code.

    Raises:
        UserError: with every problem of the flags, the address and the model.
    """
    args = read_arguments(argv, DemoArguments, "--model")
    check_extra("demo", "demo", "gradio")
    from indictune.demo.space_folder import talks

    if args.export is not None or not talks(Path(args.model)):
        other = "a classifier" if args.export is None else "--export"
        given = [(f"--{name}", value) for name, value in args.of_answers.items() if value is not None]
        Problems(problem("no-effect", *each, other=other) for each in given).raise_any()
    if args.export is not None:
        from indictune.demo.space_folder import write_space

        write_space(Path(args.model), Path(args.export))
        print(f"Written to {args.export}. To publish it: hf upload you/{args.name} {args.export} --repo-type space")
        return 0
    from indictune.serving.address import bound, warn_of_others
    from indictune.serving.server import serve

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    page = problems.attempt(page_of, args)
    problems.raise_any()
    assert listener is not None
    assert page is not None
    with listener:
        warn_of_others(listener)
        serve(page, listener, lambda url: f"{args.name} is on {url}. Ctrl-C stops it.")
    return 0


def page_of(args: DemoArguments) -> Any:
    """The application for the kind of model in the folder.

    Raises:
        UserError: with every problem of the model.
    """
    from fastapi import FastAPI
    from gradio import mount_gradio_app

    from indictune.demo import demo_models, gradio_pages
    from indictune.demo.space_folder import talks

    if talks(Path(args.model)):
        from indictune.training.talker import open_model

        blocks = gradio_pages.chat_page(args.name, demo_models.reply_with(open_model(args.talking)))
    else:
        from indictune.prediction.served_classifier import load_served_classifier

        classifier = load_served_classifier(args.reading)
        blocks = gradio_pages.classifier_page(args.name, demo_models.classify_with(classifier))
    footer, most = ["api", "settings"], gradio_pages.MAX_FILE_BYTES
    return mount_gradio_app(FastAPI(), blocks, "/", footer_links=footer, run_history=False, max_file_size=most)
