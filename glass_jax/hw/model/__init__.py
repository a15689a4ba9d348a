"""Runs a program as JAX: memories, copies, the cube, vector units and threads."""
