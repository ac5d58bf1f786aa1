"""What a run needs before it starts: memory, bytes sent and time, by closed forms."""
