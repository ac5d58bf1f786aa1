"""Metrics and tables."""
