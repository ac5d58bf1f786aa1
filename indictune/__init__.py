"""indictune: write a fine-tuning run once, choose how it is distributed by swapping a config file."""

__version__ = "0.1.0"
