"""`indictune serve`: answer HTTP requests with a finished run's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import ClassifierArguments, FinishedModelArguments, RequestLimits, flag
from indictune.errors import Problem, Problems, problem
from indictune.versions import check_extra

_PORTS = 65_535


@dataclass
class ShownModelArguments(FinishedModelArguments):
    """A finished model, and the address where it is shown."""

    host: str = flag("127.0.0.1", "Address to listen on. The default is reached from this machine alone.")
    port: int = flag(8000, "Port to listen on; 0 takes a free one.")

    def check(self) -> Iterator[Problem]:
        """Refuse an impossible port."""
        yield from super().check()
        if self.port > _PORTS:
            yield problem("port-unknown", "--port", self.port, most=_PORTS)

    @property
    def name(self) -> str:
        """Of the model, as others read it: without the path to its folder."""
        return Path(self.model).resolve().name


@dataclass
class ServeFlags(RequestLimits, ShownModelArguments, ClassifierArguments):
    """Which finished classifier is served, where, and within which limits. Other values default to its training's."""

    needed = ("model", "indictune serve FOLDER, where FOLDER is the --output_dir of a finished run.")


def run_serve(flags: Mapping[str, list[str]]) -> int:
    """Serve until a signal ends it."""
    args = read_arguments(flags, ServeFlags, "model")
    check_extra("serve", "serve", "fastapi", "fastapi_offline", "uvicorn")

    from indictune.prediction.served_classifier import Classifier, served_model
    from indictune.serving.app import create_app
    from indictune.serving.server import bound, run_server

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    served = served_model(args, problems)
    problems.raise_any()
    assert listener is not None
    assert served is not None
    with listener:
        app = create_app(Classifier(served, args.max_tokens_per_device), args.name, args)
        run_server(app, listener, lambda url: f"Serving {args.name} on {url}. Try it on {url}/docs. Ctrl-C stops it.")
    return 0
