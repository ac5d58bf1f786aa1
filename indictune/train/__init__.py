"""The run itself: the Trainer, what watches it, and the session that every script shares."""
