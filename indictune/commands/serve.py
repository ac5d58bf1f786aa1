"""`indictune serve`: answer HTTP requests with a finished run's model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import ClassifierArguments, FinishedModelArguments, RequestLimits, flag
from indictune.errors import Problem, Problems, UserError, problem

_PORTS = 65_535
_KEY_CHARACTERS = 16
_EXIT_UNANSWERED = 3


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

    def keys(self) -> list[str]:
        """The accepted keys; a `UserError` if their file cannot be read, has none, or a short one."""
        if self.api_key_file is None:
            return []
        try:
            found = Path(self.api_key_file).read_text(encoding="ascii").split()
        except (OSError, UnicodeError) as error:
            raise UserError("unreadable", "--api_key_file", self.api_key_file, reason=error) from error
        if not found or min(map(len, found)) < _KEY_CHARACTERS:
            raise UserError("api-key-short", "--api_key_file", self.api_key_file, least=_KEY_CHARACTERS)
        return found


def run_serve(flags: Mapping[str, list[str]]) -> int:
    """Serve until a signal ends it."""
    args = read_arguments(flags, ServeFlags, "model")

    from indictune.prediction.served_classifier import Classifier, served_model
    from indictune.serving.app import create_app
    from indictune.serving.server import bound, run_server

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    keys = problems.attempt(args.keys)
    served = served_model(args, problems, may_tag=True)
    problems.raise_any()
    assert listener is not None
    assert served is not None
    args.allowed_hosts = [*args.allowed_hosts, args.host]
    with listener:
        app = create_app(Classifier(served, args.max_tokens_per_device), args.name, args, keys or ())
        said = "Serving {} on {}. Try it on {}/docs. Ctrl-C stops it."
        unanswered = run_server(app, listener, lambda url: said.format(args.name, url, url), args)
    if unanswered:
        print(problem("requests-unanswered", "--drain_seconds", args.drain_seconds, count=unanswered), file=sys.stderr)
    return _EXIT_UNANSWERED if unanswered else 0
