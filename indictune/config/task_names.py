"""The tasks by name, and the script of each."""

from __future__ import annotations

# Task -> file in scripts/.
SCRIPTS = {"classification": "train_sentiment.py", "tokens": "train_tokens.py", "chat": "train_llama.py"}

# What `indictune train` takes for a task, besides its own name.
WORDS = {"sentiment": "classification", "ner": "tokens", "llama": "chat"}

# A variable by which a script knows that `indictune train` has started it: the number of that process.
LAUNCHED_BY = "INDICTUNE_LAUNCHED_BY"

# A variable by which `indictune.train` in Python asks a command how it ended: the file that gets its status.
STATUS_FILE = "INDICTUNE_STATUS_FILE"

# A variable by which `indictune parity` asks a run for a trace: the file that gets it.
PARITY_TRACE = "INDICTUNE_PARITY_TRACE"
