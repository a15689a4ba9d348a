"""``mqa_logits``: the scores by which sparse attention chooses keys (multi-query, of the indexer), as a JAX primitive.

The primitive has one operand more than the public function, the numbers of the keys: a device that has a part of them
knows from it which.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering import partition, sizes
from glass_jax.lowering.tiled import mqa_logits as tiled
from glass_jax.lowering.xla import mqa_logits as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
_HEADS = (-2, None, None, -1, None, None, None)  # axes of the operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of the primitive."""

    out_dtype: jnp.dtype


def mqa_logits(
    q: jax.typing.ArrayLike,
    kv: jax.typing.ArrayLike,
    kv_scale: jax.typing.ArrayLike | None,
    weights: jax.typing.ArrayLike,
    starts: jax.typing.ArrayLike,
    ends: jax.typing.ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Scores of every query and key, of which ``glass.topk`` chooses those that sparse attention attends to.

    Equivalent, up to summation order, to::

        s = jnp.einsum("shd,nd->shn", q, kv, preferred_element_type=jnp.float32)
        out = jnp.einsum("shn,sh->sn", jax.nn.relu(s), weights) * kv_scale
        key = jnp.arange(kv.shape[0])
        return jnp.where((starts[:, None] <= key) & (key < ends[:, None]), out, -jnp.inf)

    The products of single heads are never in memory as a whole; blocks of keys that no query of a block sees are not
    computed. DeepSeek-V3.2's indexer has 64 heads of 128; of fp8 queries, whose scales are for a query and a head, the
    scale goes into ``weights``.

    Works under ``jit``, ``vmap``, ``grad``, ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes with Auto or
    Explicit axes: batch, queries and keys stay sharded as they are, sharded heads end in one all-reduce of the result.
    ``q``, ``kv``, ``kv_scale`` and ``weights`` have derivatives of any order, but not where ``q`` is fp8; heads that
    are sharded over Explicit axes are made whole for them.

    Args:
      q: ``[*batch, Sq, H, D]``, float32, float16, bfloat16 or float8_e4m3fn (float64 on ``"xla"``).
      kv: ``[*batch, Skv, D]`` of the same type. Batch dimensions of all operands broadcast as in NumPy.
      kv_scale: ``[*batch, Skv]``, floats, or None: ones.
      weights: ``[*batch, Sq, H]``, floats.
      starts: ``[*batch, Sq]``, integers: the first key that a query sees.
      ends: ``[*batch, Sq]``, integers: the first one after those; at or before ``starts`` for none. Numbers outside of
        0 to Skv count as the nearer of the two.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[*batch, Sq, Skv]``, float32 (float64 for float64).

    Raises:
      HardwareConstraintError: (a ValueError) shapes that do not fit each other, dtypes with no meaning, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      OutOfOnChipMemoryError: (a HardwareConstraintError) a D that no tile of fits the NPU's memories.
      UnsupportedError: more than 128 heads, or float64, on the NPU; differentiation where ``q`` is fp8.
    """
    q, kv, weights, starts, ends = map(jnp.asarray, (q, kv, weights, starts, ends))
    if q.dtype not in (*checks.FLOATS, FLOAT8):
        raise errors.HardwareConstraintError(f"mqa_logits: q is {q.dtype}; use float32, float16, bfloat16 or {FLOAT8}")
    if q.dtype != kv.dtype:
        raise errors.HardwareConstraintError(
            f"mqa_logits: q is {q.dtype} and kv is {kv.dtype}; cast q to {kv.dtype}, or both to one type"
        )
    if kv_scale is None:
        checks.dimensions("mqa_logits", kv=(kv, "... Skv D"))
        kv_scale = jnp.ones(kv.shape[-2:-1], accumulator(q.dtype))
    kv_scale = jnp.asarray(kv_scale)
    checks.floats("mqa_logits", kv_scale=kv_scale, weights=weights)
    checks.integers("mqa_logits", starts=starts, ends=ends)
    extents = checks.dimensions(
        "mqa_logits",
        q=(q, "... Sq H D"),
        kv=(kv, "... Skv D"),
        kv_scale=(kv_scale, "... Skv"),
        weights=(weights, "... Sq H"),
        starts=(starts, "... Sq"),
        ends=(ends, "... Sq"),
    )
    dtype, keys = accumulator(q.dtype), extents["Skv"]
    params = Params.chosen(implementation, out_dtype=dtype)
    starts, ends = (sizes.within_int32(x, keys) for x in (starts, ends))
    operands = (q, kv, kv_scale.astype(dtype), weights.astype(dtype), starts, ends, jnp.arange(keys, dtype=jnp.int32))
    leading = [x.ndim - rank for x, rank in zip(operands, formula.RANKS, strict=True)]
    try:
        jnp.broadcast_shapes(*(x.shape[:ndim] for x, ndim in zip(operands, leading, strict=True)))
    except ValueError as error:
        shapes = ", ".join(f"{x.shape[:ndim]}" for x, ndim in zip(operands[:-1], leading, strict=False))
        raise errors.HardwareConstraintError(
            f"mqa_logits: batch dimensions {shapes} of q, kv, kv_scale, weights, starts and ends do not broadcast"
        ) from error
    ndim = max(leading)
    return MQA_LOGITS.bind(
        *(lax.expand_dims(x, range(ndim - have)) for x, have in zip(operands, leading, strict=True)), params=params
    )


# --- rules ---------------------------------------------------------------------------------------------------------


def _abstract_eval(*operands, params: Params) -> jax.ShapeDtypeStruct:
    (length, heads, depth), keys = operands[0].shape[-3:], operands[1].shape[-2]
    if params.alignment == "strict":
        tiled.check_alignment(heads, depth, str(operands[0].dtype))
    return jax.ShapeDtypeStruct((*formula.batch_shape(*operands), length, keys), params.out_dtype)


def _dimensions(*operands, params: Params) -> partition.Dimensions:
    batch = formula.batch_shape(*operands)
    lasts = ("s h d", "n d", "n", "s h", "s", "s", "n")
    terms = [
        " ".join([*partition.broadcast("b", tag, x.shape, batch), last])
        for x, last, tag in zip(operands, lasts, ("q", "k", "c", "w", "f", "e", "l"), strict=True)
    ]
    names = " ".join(f"b{d}" for d in range(len(batch)))
    return partition.Dimensions(f"{', '.join(terms)} -> {names} s n", parallel=f"{names} s n", summed="h")


def _derivative(*operands, params: Params) -> jax.Array:
    if operands[0].dtype == FLOAT8:
        raise errors.UnsupportedError(
            f"mqa_logits has no derivative where q is {FLOAT8}: it is quantized. Train the indexer in bfloat16, or put "
            "jax.lax.stop_gradient around the result"
        )
    return formula.differentiable(*map(_whole_heads, operands, _HEADS))


def _whole_heads(x: jax.Array, axis: int | None) -> jax.Array:
    """``x``, all of its heads on every device: derivatives go over them one after the other."""
    if axis is None or not axes.is_sharded(aval := jax.typeof(x)):
        return x
    spec = [*aval.sharding.spec]
    spec[axis] = None
    return jax.sharding.reshard(x, jax.NamedSharding(aval.sharding.mesh, jax.P(*spec)))


MQA_LOGITS = operation.Operation(
    "mqa_logits",
    abstract_eval=_abstract_eval,
    formula=lambda *operands, params: formula.mqa_logits(*operands),
    tiled=tiled.mqa_logits,
    batch=lambda operands, dims, *, params: (MQA_LOGITS.bind(*axes.lead(operands, dims), params=params), 0),
    dimensions=_dimensions,
    derivative=_derivative,
)
