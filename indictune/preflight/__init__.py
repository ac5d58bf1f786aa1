"""Checks of a run's plan before anything slow starts, one concern a file."""
