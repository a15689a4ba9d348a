"""SIMD regions: vector registers of 256 bytes, predicates, and the operations of ``tl.simd`` on them."""
