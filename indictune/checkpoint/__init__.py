"""Folders that are whole or not there: written, verified, chosen, resumed and converted."""
