"""Shapes of real models, by operation: what tests verify and benchmarks time."""
