"""A page to try a finished run's model on, here or as a Space."""
