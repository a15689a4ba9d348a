"""glass_jax: Ascend NPU kernels as JAX operations, with a model of the NPU to run them on."""

from glass_jax import errors, sharding
from glass_jax.config import configure
from glass_jax.lowering.bundle import export
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.tilelang_call import tilelang_call
from glass_jax.verification import verify

__all__ = ["configure", "errors", "export", "gemm", "sharding", "tilelang_call", "verify"]
