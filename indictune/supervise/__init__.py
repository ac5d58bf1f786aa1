"""One run from start to exit: its folder, lock, logs, signals and ranks."""
