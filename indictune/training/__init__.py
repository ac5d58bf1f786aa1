"""Train: the trainers, their callbacks, and the check of the saved model."""
