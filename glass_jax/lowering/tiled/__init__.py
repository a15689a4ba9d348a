"""How arrays come to tile kernels and back: batches folded, rows padded, meshes split, one file an operation."""
