"""What a run is: arguments, recipe files, and the plan that follows from both."""
