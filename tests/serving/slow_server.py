"""`indictune serve` with a model that takes a while for each text, 256 descriptors and little patience.

python tests/serving/slow_server.py SECONDS_OF_A_TEXT FOLDER FLAGS...
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from indictune.cli import main
from indictune.prediction import served_classifier
from indictune.serving import app, server

HEAD_S, BODY_S, IDLE_S = 1.0, 1.25, 1.5


def serve() -> int:
    """The exit code."""
    seconds = float(sys.argv[1])

    def label(_: Any, texts: Sequence[str]) -> list[dict[str, Any]]:
        time.sleep(seconds * len(texts))
        return [{"text": text, "label": "joy", "scores": {"joy": 1.0}, "language": "en"} for text in texts]

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for name, value in (("HEAD_S", HEAD_S), ("BODY_S", BODY_S), ("IDLE_S", IDLE_S)):
        setattr(server, name, value)
    for name, stand_in in (("label", label), ("text_batch", list), ("as_records", list), ("rounded", dict)):
        setattr(app, name, stand_in)
    reading = SimpleNamespace(text_pair_column=None)
    model = SimpleNamespace(served=SimpleNamespace(labels=["joy"], reading=reading))
    for name, found in (("served_model", model.served), ("Classifier", model)):
        setattr(served_classifier, name, lambda *_, found=found, **__: found)
    return main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(serve())
