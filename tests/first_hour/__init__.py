"""The first hour of a new user: what they type and own works, or one message says why not."""
