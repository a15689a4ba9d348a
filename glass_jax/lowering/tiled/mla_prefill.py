"""``mla_prefill`` on its tile kernels: head dimensions padded to what the hardware takes, heads beside each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glass_jax.lowering.tiled import common
from glass_jax.lowering.tilelang.kernels import attention_tiles
from glass_jax.lowering.tilelang.kernels.mla_prefill import MlaPrefillKernel
from glass_jax.lowering.tilelang.kernels.mla_prefill_backward import MlaPrefillBackwardKernel
from glass_jax.lowering.xla import mla_prefill as formula


def check_alignment(d: int, dv: int) -> None:
    """Raises HardwareConstraintError unless the hardware takes the head dimensions without padding."""
    common.check_aligned("mla_prefill", {"d": d, "dv": dv}, attention_tiles.HEAD_MULTIPLES)


def mla_prefill(
    q: jax.Array, k: jax.Array, v: jax.Array, *segment_ids: jax.Array, params
) -> tuple[jax.Array, jax.Array]:
    """Attention by the kernel; operands and ``params`` as in ``primitives.mla_prefill``."""
    if not (q.size and k.size):  # no kernel for nothing
        return formula.mla_prefill(q, k, v, *segment_ids, **params.statics)
    (batch, q_length, heads, _), dv = q.shape, v.shape[-1]
    padded = _padded(q, v)
    kernel = MlaPrefillKernel(
        batch=batch,
        heads=heads,
        q_length=q_length,
        k_length=k.shape[1],
        **padded,
        dtype=str(q.dtype),
        segments=bool(segment_ids),
        **params.statics,
    )
    operands = (_beside(q, padded["d"]), _beside(k, padded["d"]), _beside(v, padded["dv"]), *segment_ids)
    out, lse = common.run(kernel, *operands, implementation=params.implementation, chip=params.chip)
    return out.reshape(batch, q_length, heads, -1)[..., :dv], lse.reshape(batch, heads, q_length)


def mla_prefill_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *segment_ids: jax.Array,
    params,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of ``q``, ``k`` and ``v`` by two kernels; operands as in the formula."""
    if not (q.size and k.size):
        return formula.mla_prefill_backward(q, k, v, out, lse, d_out, d_lse, *segment_ids, **params.statics)
    (batch, q_length, heads, d), (_, k_length, _, dv) = q.shape, v.shape
    padded = _padded(q, v)
    tail = [(0, 0), (0, 0), (0, common.next_multiple(q_length, attention_tiles.COLUMNS) - q_length)]
    # Queries that are not there have no probabilities: the exponential of -inf is 0.
    sums = jnp.stack(
        [
            jnp.pad(lse, tail, constant_values=jnp.inf),
            jnp.pad(formula.delta_of(out, d_out, d_lse), tail),
        ],
        axis=2,
    ).reshape(batch * heads, 2, -1)
    q, k, v, d_out = (_beside(x, padded[name]) for x, name in ((q, "d"), (k, "d"), (v, "dv"), (d_out, "dv")))

    def run(of, *operands):
        kernel = MlaPrefillBackwardKernel(
            of=of,
            batch=batch,
            heads=heads,
            q_length=q_length,
            k_length=k_length,
            **padded,
            dtype=str(q.dtype),
            segments=bool(segment_ids),
            **params.statics,
        )
        operands = (*operands, sums, *segment_ids)
        return common.run(kernel, *operands, implementation=params.implementation, chip=params.chip)

    (d_q,) = run("queries", q, d_out, k, v)
    d_k, d_v = run("keys", k, v, q, d_out)

    def whole(x, width):
        return x.reshape(*x.shape[:2], heads, -1)[..., :width]

    return whole(d_q, d), whole(d_k, d), whole(d_v, dv)


def _padded(q: jax.Array, v: jax.Array) -> dict[str, int]:
    """The head dimensions that the kernels take."""
    sizes = {"d": q.shape[-1], "dv": v.shape[-1]}
    padded = {name: common.next_multiple(sizes[name], n) for name, n in attention_tiles.HEAD_MULTIPLES.items()}
    common.say_padding("mla_prefill", sizes, padded)
    return padded


def _beside(x: jax.Array, width: int) -> jax.Array:
    """``[B, S, H, D]`` as ``[B, S, H * width]``."""
    return common.pad(x, (*x.shape[:-1], width)).reshape(*x.shape[:2], -1)
