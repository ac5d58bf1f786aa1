"""Measure the rows of a run: what rows repeat, contradict or give away, and what the tokenizer does to them."""
