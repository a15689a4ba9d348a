"""``scaled_gemm`` on its kernel: scales as the cube takes them, batches folded, rows padded to what can be copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import scaled_gemm as kernels
from glass_jax.lowering.tiling import SCALE_DEPTH
from glass_jax.lowering.xla import scaled_gemm as formula

NAN = 255  # of e8m0


def scaled_gemm(*operands: jax.Array, params) -> jax.Array:
    """``scaled_gemm`` with operands and ``params`` as in the primitive."""
    if 0 in (size for x in operands for size in x.shape):  # nothing to multiply, so no kernel
        return formula.scaled_gemm(*operands, transpose_rhs=params.transpose_rhs, out_dtype=params.out_dtype)
    lhs, lhs_scale, rhs, rhs_scale = operands
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype != jnp.float8_e4m3fn:
            raise errors.UnsupportedError(
                f"scaled_gemm: {name} is {x.dtype}; the kernel takes float8_e4m3fn. Use it, or implementation='xla'"
            )
    transpose_rhs, per = params.transpose_rhs, lhs.shape[-1]  # elements of K that share a scale
    lhs = lax.collapse(lhs, lhs.ndim - 2)
    rhs = lax.collapse(rhs, rhs.ndim - 2) if transpose_rhs else lax.collapse(rhs, rhs.ndim - 3, rhs.ndim - 1)
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in (lhs, lhs_scale, rhs, rhs_scale)))
    sizes = {"m": lhs.shape[-2], "n": rhs.shape[-2 if transpose_rhs else -1], "k": lhs.shape[-1]}
    left, right = (_alike(*pair, len(batch)) for pair in ((lhs, lhs_scale), (rhs, rhs_scale)))
    (lhs, lhs_scale), (rhs, rhs_scale) = common.fold(batch, left, right)
    rows = lhs.shape[-2]
    multiples = kernels.alignment(str(params.out_dtype), transpose_rhs=transpose_rhs)
    padded = {name: common.next_multiple(size, multiples[name]) for name, size in (sizes | {"m": rows}).items()}
    common.say_padding("scaled_gemm", sizes | {"m": rows}, padded)
    lhs = common.pad(lhs, (lhs.shape[0], padded["m"], padded["k"]))
    rhs = common.pad(rhs, (rhs.shape[0], *(padded[d] for d in ("nk" if transpose_rhs else "kn"))))
    kernel = kernels.ScaledGemmKernel(
        batch=max(lhs.shape[0], rhs.shape[0]),
        lhs_batched=lhs.shape[0] > 1,
        rhs_batched=rhs.shape[0] > 1,
        **padded,
        out_dtype=str(params.out_dtype),
        transpose_rhs=transpose_rhs,
    )
    scales = [_pairs(x, per, shape) for x, shape in zip((lhs_scale, rhs_scale), kernel.scale_shapes, strict=True)]
    (out,) = common.run(kernel, lhs, scales[0], rhs, scales[1], implementation=params.implementation, chip=params.chip)
    return out[:, :rows, : sizes["n"]].reshape(*batch, sizes["m"], sizes["n"])


def check_alignment(m: int, n: int, k: int, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes M, N and K without padding."""
    multiples = kernels.alignment(str(params.out_dtype), transpose_rhs=params.transpose_rhs)
    common.check_aligned(
        "scaled_gemm", {"m": m, "n": n, "k": k}, multiples, "whole blocks of 32 bytes, pairs of scales"
    )


def e8m0_bytes(scale: jax.Array) -> jax.Array:
    """Scales as the bytes of e8m0; of a float32 that is none of its numbers, 2**-127 to 2**127, a NaN."""
    if scale.dtype == formula.E8M0:
        return lax.bitcast_convert_type(scale, jnp.uint8)
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = bits >> 23  # with the sign, which makes it too large
    power = (bits & ((1 << 23) - 1) == 0) & (exponent > 0) & (exponent < NAN)
    smallest = bits == 1 << 22  # 2**-127, the one subnormal number among them, of byte 0
    return jnp.where(power, exponent, jnp.where(smallest, 0, NAN)).astype(jnp.uint8)


def _pairs(scale: jax.Array, per: int, shape: tuple[int, int, int]) -> jax.Array:
    """Scales ``[batch, rows, K / per]`` as the kernel takes them: pairs of bytes, each for 32 elements of K.

    Args:
      scale: float32 or float8_e8m0fnu.
      per: elements of K that share one.
      shape: ``[batch or 1, pairs, rows]`` of the result; what is added to the rows and to K is the smallest scale.
    """
    scales = jnp.repeat(e8m0_bytes(scale), per // SCALE_DEPTH, axis=-1)
    _, pairs, rows = shape
    missing = rows - scales.shape[1], 2 * pairs - scales.shape[2]
    scales = jnp.pad(scales, [(0, 0), (0, missing[0]), (0, missing[1])])
    words = lax.bitcast_convert_type(scales.reshape(-1, rows, pairs, 2), jnp.uint16)
    return jnp.swapaxes(words, 1, 2)


def _alike(x: jax.Array, scale: jax.Array, ndim: int) -> tuple[jax.Array, jax.Array]:
    """An operand and its scales with the same ``ndim`` batch dimensions."""
    batch = jnp.broadcast_shapes(x.shape[:ndim], scale.shape[:ndim])
    return tuple(jnp.broadcast_to(each, (*batch, *each.shape[ndim:])) for each in (x, scale))
