"""Weights: which model a run fine-tunes, how it is loaded, and the small model that comes with the package."""
