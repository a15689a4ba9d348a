"""Values as JAX arrays: rounding, memories, registers, and what many lanes read and write at once."""
