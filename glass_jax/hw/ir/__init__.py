"""A kernel as plain data: what it says, how it is written down, and what can be read from it without running it."""
