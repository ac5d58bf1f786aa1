"""What a model learns: one file a task, which reads its rows, makes its model and scores its results."""
