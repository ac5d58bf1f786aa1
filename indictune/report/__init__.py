"""The report of a run: one page with pictures, and one that compares runs."""
