# The public names: each one's module, and the document that describes it. Type checkers read this file as it is, and
# __init__.py loads a name from its line when it is first used.

from glass_jax import errors as errors  # docs/operations.md
from glass_jax import nn as nn  # docs/models.md
from glass_jax import sharding as sharding  # docs/sharding.md
from glass_jax.config import configure as configure  # docs/operations.md
from glass_jax.debugging import debug as debug  # docs/verification.md
from glass_jax.fusion.transform import fuse as fuse  # docs/fusion.md
from glass_jax.lowering.bundle import export as export  # docs/ascend.md
from glass_jax.primitives.fused_linear import linear_ln_gelu as linear_ln_gelu  # docs/operations.md
from glass_jax.primitives.fused_linear import ln_gelu_linear as ln_gelu_linear  # docs/operations.md
from glass_jax.primitives.gemm import gemm as gemm  # docs/operations.md
from glass_jax.primitives.grouped_gemm import grouped_gemm as grouped_gemm  # docs/operations.md
from glass_jax.primitives.grouped_gemm import masked_grouped_gemm as masked_grouped_gemm  # docs/operations.md
from glass_jax.primitives.mla_decode import mla_decode as mla_decode  # docs/operations.md
from glass_jax.primitives.mla_prefill import mla_prefill as mla_prefill  # docs/operations.md
from glass_jax.primitives.moe_gate import moe_gate as moe_gate  # docs/operations.md
from glass_jax.primitives.mqa_logits import mqa_logits as mqa_logits  # docs/operations.md
from glass_jax.primitives.normalization import layer_norm as layer_norm  # docs/operations.md
from glass_jax.primitives.normalization import rms_norm as rms_norm  # docs/operations.md
from glass_jax.primitives.paged_attention import paged_attention as paged_attention  # docs/operations.md
from glass_jax.primitives.quantize import quantize as quantize  # docs/operations.md
from glass_jax.primitives.scaled_gemm import scaled_gemm as scaled_gemm  # docs/operations.md
from glass_jax.primitives.sparse_mla_prefill import sparse_mla_prefill as sparse_mla_prefill  # docs/operations.md
from glass_jax.primitives.swiglu import swiglu as swiglu  # docs/operations.md
from glass_jax.primitives.tilelang_call import tilelang_call as tilelang_call  # docs/guide-kernels.md
from glass_jax.primitives.topk import topk as topk  # docs/operations.md
from glass_jax.verification import verify as verify  # docs/verification.md
