"""The product's promises, measured by ``python -m benchmarks``."""
