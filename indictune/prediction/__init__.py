"""Label texts with a finished run's classifier."""
