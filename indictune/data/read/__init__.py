"""Read files and datasets of the Hub as rows."""
