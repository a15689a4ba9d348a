"""``sparse_mla_prefill`` on the kernel of ``mla_decode``: each query a sequence of its own, in pages of one token."""

from __future__ import annotations

import jax

from glass_jax.lowering.tiled import mla_decode
from glass_jax.lowering.xla import sparse_mla_prefill as formula

NAME = "sparse_mla_prefill"


def sparse_mla_prefill(
    q: jax.Array, kv: jax.Array, indices: jax.Array, sink: jax.Array, *, params
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over chosen tokens by the kernel; operands and ``params`` as in ``primitives.sparse_mla_prefill``."""
    batch = formula.batch_shape(q, kv, indices, sink)
    if 0 in (*q.shape, *kv.shape, *indices.shape):
        return formula.nothing((*batch, *q.shape[-3:]), q.dtype, params.head_dim_v)
    table, lengths = formula.in_front(formula.of_indices(indices, kv, batch)[:, 0])
    q, sink, kv = formula.of_queries(q, batch), formula.of_queries(sink, batch), formula.of_tokens(kv, batch)
    out, largest, lse = mla_decode.attend(
        NAME, q[:, None], kv[:, None], table, lengths, sink, params=params, causal=False
    )
    return tuple(x.reshape(*batch, -1, *x.shape[1:]) for x in (out[:, 0], largest[..., 0], lse[..., 0]))


def check_alignment(q: jax.Array, params) -> None:
    """Raises HardwareConstraintError unless the hardware takes D and the value's size without padding."""
    mla_decode.check_alignment(NAME, q, params)
