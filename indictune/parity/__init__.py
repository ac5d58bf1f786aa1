"""`indictune parity`: does a recipe train the same model under every strategy file?"""
