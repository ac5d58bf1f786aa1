"""Folders that are whole or not there: written, verified, chosen, gone on from and converted."""
