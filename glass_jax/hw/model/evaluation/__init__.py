"""The state of a block in execution, and expressions evaluated on it."""
