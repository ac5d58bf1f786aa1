"""Rows: read, cleaned and checked, tokenised once, dealt into batches."""
