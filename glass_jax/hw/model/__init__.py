"""Runs a program as JAX."""
