"""Statements on whole tiles: copies, fills, matrix products, reductions."""
