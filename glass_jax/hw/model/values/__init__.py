"""Values as JAX arrays: indices, rounding, memories, registers, and what many lanes read and write at once."""
