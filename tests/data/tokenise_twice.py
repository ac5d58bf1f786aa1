"""The most memory after a file was read and tokenised, and after another: `FEW MANY`."""

from __future__ import annotations

import sys

from indictune.config.arguments import DataArguments
from indictune.data.load_rows import load_splits
from indictune.data.text.tokenisation import tokenise_splits
from tests.models.tiny import words_tokenizer


def peak_kib() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    for path in sys.argv[1:]:
        tokenise_splits(load_splits(DataArguments(train_file=path)), words_tokenizer(), ["a", "b"], 256)
        print(peak_kib())
