"""Programs that measure; their result files lie in results/."""
