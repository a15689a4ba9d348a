"""What the vector units do in every lane: parallel loops, threads, atomics."""
