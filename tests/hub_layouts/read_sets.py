"""Read and tokenise the rows of datasets, as `indictune prepare` does: commands as JSON, results as JSON.

One process reads all of them, as each start costs seconds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from indictune.commands.prepare import prepare_rows, task_of_flags
from indictune.config.command_line import read_command_line
from indictune.errors import UserError

TASKS = {"sentiment": "classification", "ner": "tokens", "llama": "chat"}


def result_of(words: Sequence[str]) -> dict[str, Any]:
    """The rows of each split and language of a command, or the codes of its refusal."""
    task, *flags = words
    argv = [*flags, "--task", TASKS[task], "--output_dir", "out", "--max_length", "48", "--max_unknown_share", "1"]
    try:
        made = prepare_rows(*task_of_flags(read_command_line(argv).flags))
    except UserError as error:
        return {"refused": [each.code for each in error.problems], "said": error.message}
    tokens = made.tokens
    found = {"train": tokens.train, "validation": tokens.validation, "test": tokens.test}
    return {
        split: dict(sorted(Counter(rows["language"][:]).items())) if "language" in rows.column_names else len(rows)
        for split, rows in found.items()
        if rows is not None
    }


if __name__ == "__main__":
    print("results: " + json.dumps({name: result_of(words) for name, words in json.loads(sys.argv[1]).items()}))
