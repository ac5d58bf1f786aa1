"""Clean texts and turn them into tokens."""
