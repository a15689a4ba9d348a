"""glass_jax: Ascend NPU kernels as JAX operations, with a model of the NPU to run them on."""

import importlib
from typing import TYPE_CHECKING

from glass_jax import errors
from glass_jax.config import configure
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.tilelang_call import tilelang_call

if TYPE_CHECKING:
    from glass_jax import nn, sharding
    from glass_jax.debugging import debug
    from glass_jax.fusion.transform import fuse
    from glass_jax.lowering.bundle import export
    from glass_jax.primitives.fused_linear import linear_ln_gelu, ln_gelu_linear
    from glass_jax.primitives.grouped_gemm import grouped_gemm, masked_grouped_gemm
    from glass_jax.primitives.mla_decode import mla_decode
    from glass_jax.primitives.mla_prefill import mla_prefill
    from glass_jax.primitives.moe_gate import moe_gate
    from glass_jax.primitives.mqa_logits import mqa_logits
    from glass_jax.primitives.normalization import layer_norm, rms_norm
    from glass_jax.primitives.paged_attention import paged_attention
    from glass_jax.primitives.quantize import quantize
    from glass_jax.primitives.scaled_gemm import scaled_gemm
    from glass_jax.primitives.sparse_mla_prefill import sparse_mla_prefill
    from glass_jax.primitives.swiglu import swiglu
    from glass_jax.primitives.topk import topk
    from glass_jax.verification import verify

__all__ = [
    "configure",
    "debug",
    "errors",
    "export",
    "fuse",
    "gemm",
    "grouped_gemm",
    "layer_norm",
    "linear_ln_gelu",
    "ln_gelu_linear",
    "masked_grouped_gemm",
    "mla_decode",
    "mla_prefill",
    "moe_gate",
    "mqa_logits",
    "nn",
    "paged_attention",
    "quantize",
    "rms_norm",
    "scaled_gemm",
    "sharding",
    "sparse_mla_prefill",
    "swiglu",
    "tilelang_call",
    "topk",
    "verify",
]

# Tools and the sharding runtime load when they are first used: a model that only multiplies starts without them.
_LOADED_ON_USE = {
    "debug": "glass_jax.debugging",
    "export": "glass_jax.lowering.bundle",
    "fuse": "glass_jax.fusion.transform",
    "grouped_gemm": "glass_jax.primitives.grouped_gemm",
    "layer_norm": "glass_jax.primitives.normalization",
    "linear_ln_gelu": "glass_jax.primitives.fused_linear",
    "ln_gelu_linear": "glass_jax.primitives.fused_linear",
    "masked_grouped_gemm": "glass_jax.primitives.grouped_gemm",
    "mla_decode": "glass_jax.primitives.mla_decode",
    "mla_prefill": "glass_jax.primitives.mla_prefill",
    "moe_gate": "glass_jax.primitives.moe_gate",
    "mqa_logits": "glass_jax.primitives.mqa_logits",
    "paged_attention": "glass_jax.primitives.paged_attention",
    "quantize": "glass_jax.primitives.quantize",
    "rms_norm": "glass_jax.primitives.normalization",
    "scaled_gemm": "glass_jax.primitives.scaled_gemm",
    "sparse_mla_prefill": "glass_jax.primitives.sparse_mla_prefill",
    "swiglu": "glass_jax.primitives.swiglu",
    "topk": "glass_jax.primitives.topk",
    "verify": "glass_jax.verification",
}


def __getattr__(name: str) -> object:
    if name in ("nn", "sharding"):
        return importlib.import_module(f"glass_jax.{name}")
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
