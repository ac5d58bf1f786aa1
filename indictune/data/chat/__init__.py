"""Read conversations and turn them into tokens."""
