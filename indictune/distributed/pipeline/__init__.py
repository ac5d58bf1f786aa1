"""A model cut into stages, which compute micro-batches one after another on different ranks."""
