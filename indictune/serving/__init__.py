"""Answer HTTP requests with a finished run's model."""
