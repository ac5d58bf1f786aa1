"""Rows: read, clean and check them, tokenise them once, and split them into batches."""
