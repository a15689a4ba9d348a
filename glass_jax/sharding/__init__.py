"""Collectives, simulated meshes and expert parallelism."""
