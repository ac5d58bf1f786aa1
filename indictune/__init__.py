"""indictune: write a fine-tuning run once, choose how it is distributed by swapping a config file."""

import logging

from indictune.api import (
    Loaded,
    chat,
    compare,
    evaluate,
    inspect,
    load,
    merge,
    plan,
    predict,
    push,
    serve,
    train,
    trainer,
)
from indictune.errors import UserError
from indictune.run_result import Result
from indictune.versions import __version__

__all__ = [
    "Loaded", "Result", "UserError", "__version__", "chat", "compare", "evaluate", "inspect", "load", "merge", "plan",
    "predict", "push", "serve", "train", "trainer",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


# bitsandbytes 0.50 reports on import, before any logging is set up, that an optional package of faster CPU kernels is
# missing. With a handler of its own the message waits for the rank's log file.
logging.getLogger("bitsandbytes").addHandler(logging.NullHandler())
