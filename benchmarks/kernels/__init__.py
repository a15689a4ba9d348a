"""Kernels in TileLang's Ascend language that benchmarks and tests run as a user would."""
