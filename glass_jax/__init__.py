"""glass_jax: Ascend NPU kernels as JAX operations, with a model of the NPU to run them on."""

import importlib
from typing import TYPE_CHECKING

from glass_jax import errors
from glass_jax.config import configure
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.tilelang_call import tilelang_call

if TYPE_CHECKING:
    from glass_jax import sharding
    from glass_jax.debugging import debug
    from glass_jax.lowering.bundle import export
    from glass_jax.verification import verify

__all__ = ["configure", "debug", "errors", "export", "gemm", "sharding", "tilelang_call", "verify"]

# Tools and the sharding runtime load when they are first used: a model that only multiplies starts without them.
_LOADED_ON_USE = {
    "debug": "glass_jax.debugging",
    "export": "glass_jax.lowering.bundle",
    "verify": "glass_jax.verification",
}


def __getattr__(name: str) -> object:
    if name == "sharding":
        return importlib.import_module("glass_jax.sharding")
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
