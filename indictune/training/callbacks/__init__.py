"""Callbacks of the trainers, one concern a file."""
