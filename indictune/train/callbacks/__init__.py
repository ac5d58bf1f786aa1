"""What happens between the steps, one concern a file."""
