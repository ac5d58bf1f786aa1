"""`indictune serve`: answer HTTP requests with a finished run's model."""

from __future__ import annotations

from collections.abc import Sequence

from indictune.config.recipe import read_arguments
from indictune.config.serving_arguments import ServeArguments
from indictune.errors import Problems
from indictune.versions import check_extra


def serve_command(argv: Sequence[str]) -> int:
    """`indictune serve FOLDER [flags]`; returns the exit code.

    Raises:
        UserError: with every problem of the flags, the address and the model.
    """
    args = read_arguments(argv, ServeArguments, "--model")
    check_extra("serve", "serve", "fastapi", "fastapi_offline", "uvicorn")

    from indictune.prediction.served_classifier import Classifier, served_model
    from indictune.serving.address import bound, warn_of_others
    from indictune.serving.app import create_app
    from indictune.serving.server import serve

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    served = served_model(args.reading, problems)
    problems.raise_any()
    assert listener is not None
    assert served is not None
    with listener:
        app = create_app(Classifier(served, args.max_tokens_per_device), args)
        warn_of_others(listener)
        serve(app, listener, lambda url: f"Serving {args.name} on {url}. Try it on {url}/docs. Ctrl-C stops it.")
    return 0
