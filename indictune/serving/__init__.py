"""Answer HTTP requests with a finished run's model, and show a page to try it on, here or as a Space."""
