"""What `indictune doctor` checks: this machine, its ranks, and a recipe."""
