"""What a trained classifier is worth: its metrics, as numbers and as text."""
