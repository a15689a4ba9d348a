"""Expert parallelism: tokens to the ranks of their experts, and the experts' results back.

Call both functions where each rank has its own tokens and its own experts: inside ``jax.shard_map``, or under ``vmap`` with a
named axis. With ``rows, handle = moe_dispatch(x, topk_idx, topk_weights, axis_name="x", num_experts=E)``, rank r of P has
the experts ``r*E/P .. (r+1)*E/P - 1`` and computes

    y = experts(rows, handle.group_sizes)      # [C, H]: groups of rows, one after another
    out = moe_combine(y, handle)               # [T, H]: for each token, the sum over k of topk_weights[k] * y of expert k

Shapes are static and counts stay on the device. How rows travel is in :mod:`exchange`, where they go in :mod:`expert_layout`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from glass_jax import errors
from glass_jax.sharding import exchange, payload
from glass_jax.sharding.exchange import Channel
from glass_jax.sharding.expert_layout import Handle, Limits, Relay, layout, merge_equal, round_up


def moe_dispatch(
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    axis_name: str | tuple[str, str],
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    payload_dtype: DTypeLike | None = None,
    fixed_buffers: bool = False,
) -> tuple[Any, Handle]:
    """Sends each token to the ranks of its experts.

    A token goes to a rank once, and there becomes one row for each expert of the rank that it chose. If it names an expert
    more than once, that is one choice with the sum of the weights. Rows of one expert are in order of the rank they come from,
    then of the token; the same call gives the same rows in the same order, bit for bit.

    With two axes ``(node, device)``, of which ranks are numbered in this order, a token goes once to each node, to the
    device there with its sender's number, and from there to its experts. ``rows`` are the same as with one axis.

    Args:
      x: ``[T, H]``, a rank's tokens; or a pytree of such arrays, as are the values and scales of quantized tokens.
      topk_idx: integers ``[T, K]``, the experts that each token chose, -1: none. Ranks with fewer tokens than others fill
        up with tokens that choose none.
      topk_weights: floating point ``[T, K]``, the weights of the choices.
      axis_name: the mesh axis, or two of them.
      num_experts: E, experts on all ranks together, a multiple of the number of ranks P.
      capacity: rows that a rank has room for. None: room for whatever the tokens may choose, ``P*T*min(K, E/P)`` rows. A
        smaller one takes ``capacity // P`` rows from each rank (in order of the token, then of k), leaves out the others and
        counts them in ``handle.dropped``; see :meth:`Handle.check`. Of two axes, a node takes ``capacity // nodes`` tokens
        from each rank, and a rank ``capacity // devices`` rows from each of its node.
      alignment: each expert's rows begin at a multiple of it.
      payload_dtype: what floating-point values travel as. An 8-bit type has a float32 scale for each 128 values of a token.
        ``rows`` have the dtype of ``x`` all the same. Gradients travel as they are.
      fixed_buffers: give each expert a buffer of its own that holds every token of every rank (``capacity`` rows, if that is
        fewer), as a masked grouped product takes it.

    Returns:
      rows: ``[C, H]``, zero outside of the groups. C is ``capacity`` with room for the groups' padding; with
        ``fixed_buffers``, ``[E/P, P*T, H]``.
      handle: sizes and starts of the groups and all that :func:`moe_combine` needs.

    Raises:
      HardwareConstraintError: shapes or dtypes do not fit together; E is no multiple of P; the capacity is less than P.

    Differentiable in ``x`` and ``topk_weights`` (in reverse, any number of times): the gradient of a dispatch is a combine, and
    that of a combine a dispatch, with the same handle. Float32 sums, in order of k.
    """
    axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    sizes = _check(x, topk_idx, topk_weights, axis_names, num_experts, capacity, alignment)
    tokens, k = topk_idx.shape
    ranks = math.prod(sizes)
    worst = ranks * tokens * min(k, num_experts // ranks)
    capacity = worst if capacity is None else min(capacity, max(worst, ranks))
    buffer = round_up(min(ranks * tokens, capacity), alignment) if fixed_buffers else None

    idx = exchange.own(topk_idx.astype(jnp.int32), *axis_names)
    weights = exchange.own(topk_weights.astype(jnp.float32), *axis_names)
    exists = (idx >= 0) & (idx < num_experts)
    unknown = jnp.sum((idx != -1) & ~exists, dtype=jnp.int32)[None]
    idx, weights = merge_equal(jnp.where(exists, idx, -1), weights)
    limits = Limits(num_experts, capacity, alignment, buffer, tokens * k / sizes[-1])
    if len(axis_names) == 1:
        handle = layout(idx, weights, axis_names[0], limits)
    else:
        handle = _layout_of_nodes(idx, weights, axis_names, sizes, limits)
    handle = dataclasses.replace(handle, dropped=handle.dropped + unknown)
    return moe_redispatch(x, handle, payload_dtype=payload_dtype), handle


def moe_redispatch(x: Any, handle: Handle, *, payload_dtype: DTypeLike | None = None) -> Any:
    """Sends other tokens the way that ``handle`` knows: :func:`moe_dispatch` without the exchange of the layout.

    Args:
      x: ``[T, H]``, or a pytree of such arrays.
      handle: of a dispatch of as many tokens.
      payload_dtype: as in :func:`moe_dispatch`.

    Returns:
      ``rows``, as :func:`moe_dispatch` returns them.

    Raises:
      HardwareConstraintError: ``x`` has another number of tokens, or a dtype that cannot travel as ``payload_dtype``.
    """
    dtype = None if payload_dtype is None else jnp.dtype(payload_dtype)
    return jax.tree.map(lambda leaf: _dispatch_leaf(leaf, handle, dtype), x)


def moe_combine(y: jax.Array, handle: Handle, *, weighted: bool = True, bias: jax.Array | None = None) -> jax.Array:
    """Brings the experts' results back to their tokens and adds them up.

    Args:
      y: what the experts made of ``rows``, ``[C, H]`` or ``[E/P, C*P/E, H]`` as those were; H is free. Rows outside of the
        groups are never read.
      handle: of the dispatch.
      weighted: multiply each row by its choice's weight. False: a plain sum over the token's experts, for results that were
        multiplied before (``handle.row_weights``) or need not be.
      bias: ``[H]`` or ``[T, H]``, what the sum begins with.

    Returns:
      ``[T, H]`` in the dtype of ``y``, summed in float32 in order of k: the same bits on any number of ranks. Of two axes, each
      node sums in this order, and then the nodes' sums in order of their first choice.

    Raises:
      HardwareConstraintError: ``y`` is not of the shape of ``rows``.
    """
    if y.ndim != len(handle.shape) + 1 or y.shape[:-1] != handle.shape:
        expected = ", ".join(map(str, (*handle.shape, "H")))
        raise errors.HardwareConstraintError(
            f"moe_combine: y of shape {y.shape} is not one row for each that moe_dispatch returned, [{expected}]"
        )
    y = exchange.own(y.reshape(-1, y.shape[-1]), handle.channel.axis)
    weights = (handle.row_weights, lax.stop_gradient(handle.choice_weights)) if weighted else None
    if handle.nodes is None:
        return _combine(y, weights, _start(bias, handle.choice_weights.shape[0], y), handle).astype(y.dtype)
    in_node = _combine(y, weights, _start(None, handle.choice_weights.shape[0], y), handle)
    out = _relay_back(in_node, handle.nodes)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(y.dtype)
