"""The most own memory, in KiB, while a file was read and tokenised, and then another: `FEW MANY`.

Mapped files do not count: the kernel takes their pages back when it needs them.
"""

from __future__ import annotations

import sys
import threading

from indictune.config.arguments import DataArguments
from indictune.data.load_rows import load_splits
from indictune.data.text.tokenisation import tokenise_splits
from tests.models.tiny import words_tokenizer

peak, ended = 0, threading.Event()


def watch() -> None:
    global peak
    while not ended.wait(0.01):
        with open("/proc/self/status", encoding="utf-8") as status:
            peak = max(peak, int(next(line for line in status if line.startswith("RssAnon")).split()[1]))


if __name__ == "__main__":
    threading.Thread(target=watch).start()
    try:
        for path in sys.argv[1:]:
            tokenise_splits(load_splits(DataArguments(train_file=path)), words_tokenizer(), ["a", "b"], 256)
            print(peak)
    finally:
        ended.set()
