"""`indictune parity`: whether a recipe trains the same model under every strategy file."""
