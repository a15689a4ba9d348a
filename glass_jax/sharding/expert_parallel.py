"""Expert parallelism: tokens to the ranks of their experts, and the experts' results back.

Call both functions where each rank has its own tokens and its own experts: inside ``jax.shard_map``, or under ``vmap``
with a named axis. With ``rows, handle = moe_dispatch(x, topk_idx, topk_weights, axis_name="x", num_experts=E)``, rank r
of P has the experts ``r*E/P .. (r+1)*E/P - 1`` and computes

    y = experts(rows, handle.group_sizes)      # [C, H]: groups of rows, one after another
    out = moe_combine(y, handle)               # [T, H]: for each token, the sum over k of topk_weights[k] * y of expert
    k

Shapes are static and counts stay on the device. How rows travel is in :mod:`exchange`, where they go in
:mod:`expert_layout`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from glass_jax import errors
from glass_jax.primitives import axes
from glass_jax.sharding import checks, exchange, payload, transposable
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

    A token goes to a rank once, and there becomes one row for each expert of the rank that it chose. If it names an
    expert more than once, that is one choice with the sum of the weights. Rows of one expert are in order of the rank
    they come from, then of the token; the same call gives the same rows in the same order, bit for bit.

    With two axes ``(node, device)``, of which ranks are numbered in this order, a token goes once to each node, to the
    device there with its sender's number, and from there to its experts. ``rows`` are the same as with one axis.

    Args:
      x: ``[T, H]``, a rank's tokens; or a pytree of such arrays, as are the values and scales of quantized tokens.
      topk_idx: integers ``[T, K]``, the experts that each token chose, -1: none. Ranks with fewer tokens than others
        fill up with tokens that choose none.
      topk_weights: floating point ``[T, K]``, the weights of the choices.
      axis_name: the mesh axis, or two of them.
      num_experts: E, experts on all ranks together, a multiple of the number of ranks P.
      capacity: rows that a rank has room for. None: room for whatever the tokens may choose, ``P*T*min(K, E/P)`` rows.
        A smaller one takes ``capacity // P`` rows from each rank (in order of the token, then of k), leaves out the
        others and counts them in ``handle.dropped``; see :meth:`Handle.check`. Of two axes, a node takes ``capacity //
        nodes`` tokens from each rank, and a rank ``capacity // devices`` rows from each of its node.
      alignment: each expert's rows begin at a multiple of it.
      payload_dtype: what floating-point values travel as. An 8-bit type has a float32 scale for each 128 values of a
        token. ``rows`` have the dtype of ``x`` all the same. Gradients travel as they are.
      fixed_buffers: give each expert a buffer of its own that holds every token of every rank (``capacity`` rows, if
        that is fewer), as a masked grouped product takes it.

    Returns:
      rows: ``[C, H]``, zero outside of the groups. C is ``capacity`` with room for the groups' padding; with
        ``fixed_buffers``, ``[E/P, P*T, H]``.
      handle: sizes and starts of the groups and all that :func:`moe_combine` needs.

    Raises:
      CollectiveError: shapes or dtypes do not fit together; E is no multiple of P; the capacity is less than P.

    Differentiable in ``x`` and ``topk_weights``, forward and in reverse, any number of times: the gradient of a
    dispatch is a combine, and that of a combine a dispatch, with the same handle. Float32 sums, in order of k.
    """
    axis_names, sizes = _check(topk_idx, topk_weights, axis_name, num_experts, capacity, alignment)
    (tokens, k), ranks = topk_idx.shape, math.prod(sizes)
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
      CollectiveError: ``x`` has another number of tokens, or a dtype that cannot travel as ``payload_dtype``.
    """
    dtype = None if payload_dtype is None else jnp.dtype(payload_dtype)
    tokens = handle.token_count

    def send(leaf: jax.Array) -> jax.Array:
        if leaf.ndim != 2 or leaf.shape[0] != tokens:
            raise errors.CollectiveError(f"moe_dispatch: x of shape {leaf.shape} is not [{tokens}, H], a row a token")
        if dtype is not None:
            payload.check(leaf.dtype, dtype)
        dispatch = _differentiable_dispatch if jnp.issubdtype(leaf.dtype, jnp.floating) else _dispatch
        rows = dispatch(dtype, exchange.own(leaf, *handle.axis_names), handle)
        return rows.reshape(*handle.shape, leaf.shape[1])

    return jax.tree.map(send, x)


def moe_combine(y: jax.Array, handle: Handle, *, weighted: bool = True, bias: jax.Array | None = None) -> jax.Array:
    """Brings the experts' results back to their tokens and adds them up.

    Args:
      y: what the experts made of ``rows``, ``[C, H]`` or ``[E/P, C*P/E, H]`` as those were; H is free. Rows outside of
        the groups are never read.
      handle: of the dispatch.
      weighted: multiply each row by its choice's weight. False: a plain sum over the token's experts, for results that
        were multiplied before (``handle.row_weights``) or need not be.
      bias: ``[H]`` or ``[T, H]``, what the sum begins with.

    Returns:
      ``[T, H]`` in the dtype of ``y``, summed in float32 in order of k: the same bits on any number of ranks. Of two
      axes, each node sums in this order, and then the nodes' sums in order of their first choice.

    Raises:
      CollectiveError: ``y`` is not of the shape of ``rows``.
    """
    if y.ndim != len(handle.shape) + 1 or y.shape[:-1] != handle.shape:
        expected = ", ".join(map(str, (*handle.shape, "H")))
        raise errors.CollectiveError(
            f"moe_combine: y of shape {y.shape} is not one row for each that moe_dispatch returned, [{expected}]"
        )
    y, start = exchange.own(y.reshape(-1, y.shape[-1]), *handle.axis_names), None
    if bias is not None:
        bias = exchange.own(bias.astype(jnp.float32), *handle.axis_names)
        start = jnp.broadcast_to(bias, (handle.token_count, y.shape[-1]))
    row_weights = exchange.own(handle.row_weights, *handle.axis_names) if weighted else None
    # The experts' results may also vary over axes that the tokens do not, as partial sums of tensor parallelism do.
    given = axes.vary_alike(*(operand for operand in (y, row_weights, start) if operand is not None))
    y, row_weights, start = (None if x is None else given.pop(0) for x in (y, row_weights, start))
    return _combine(y, row_weights, start, handle).astype(y.dtype)


def _dispatch(payload_dtype: jnp.dtype | None, x: jax.Array, handle: Handle) -> jax.Array:
    """``x`` ``[T, H]`` as rows ``[C, H]``."""
    sent = payload.encode(x, payload_dtype)
    if handle.nodes is not None:
        sent = handle.nodes.send(sent)
    came = exchange.take(handle.tokens.send(sent), handle.row_tokens)
    return payload.decode(came, payload_dtype, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable_dispatch(payload_dtype: jnp.dtype | None, x: jax.Array, handle: Handle) -> jax.Array:
    return _dispatch(payload_dtype, x, handle)


@functools.partial(_differentiable_dispatch.defjvp, symbolic_zeros=True)
def _dispatch_jvp(payload_dtype, primals, tangents):
    (x, handle), x_dot = primals, tangents[0]
    rows = _differentiable_dispatch(payload_dtype, x, handle)
    if isinstance(x_dot, SymbolicZero):
        return rows, jnp.zeros_like(rows)
    return rows, _linear("dispatch", handle, x_dot, x.dtype)


@jax.custom_jvp
def _combine(y: jax.Array, row_weights: jax.Array | None, start: jax.Array | None, handle: Handle) -> jax.Array:
    """``start``, or zero, plus each token's rows of ``y`` ``[C, H]``, weighted unless None: ``[T, H]`` float32.

    The weights that are multiplied are those that the tokens' ranks hold; ``row_weights`` are the same numbers where
    the rows are, and what the derivative is taken by, so that neither rows nor gradients of choices have to be stored
    or sent again.
    """
    came = handle.channel.collect(y, handle.sent_rows, handle.choice_places, handle.longest)
    weights = None if row_weights is None else handle.choice_weights
    if handle.nodes is None:
        return _sum_of_choices(came, weights, handle.choice_weights.shape, start)
    in_node = _sum_of_choices(came, weights, handle.choice_weights.shape, None)
    nodes = handle.nodes
    places = jnp.where(nodes.first, nodes.places, nodes.channel.none).ravel()
    came = nodes.channel.collect(in_node, jnp.arange(nodes.channel.none, dtype=jnp.int32), places, nodes.longest)
    return _sum_of_choices(came, None, nodes.places.shape, start)


@functools.partial(_combine.defjvp, symbolic_zeros=True)
def _combine_jvp(primals, tangents):
    (y, row_weights, start, handle), (y_dot, weights_dot, start_dot, _) = primals, tangents
    out = _combine(y, row_weights, start, handle)
    terms = []
    if not isinstance(y_dot, SymbolicZero):
        y_dot = y_dot.astype(jnp.float32)
        terms.append(y_dot if row_weights is None else row_weights[:, None] * y_dot)
    if not (weights_dot is None or isinstance(weights_dot, SymbolicZero)):
        exists = handle.row_tokens < handle.tokens.channel.none  # the padding of y may hold anything, even NaN
        terms.append(weights_dot[:, None] * jnp.where(exists[:, None], y, 0).astype(jnp.float32))
    out_dot = _linear("combine", handle, sum(terms), y.dtype) if terms else jnp.zeros_like(out)
    return out, out_dot if start is None or isinstance(start_dot, SymbolicZero) else out_dot + start_dot


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A dispatch of tangents ``[T, H]`` or a plain combine of tangents ``[C, H]``, each the transpose of the other.

    Attributes:
      name: ``"dispatch"`` or ``"combine"``.
      sizes: T and C.
      dtype: what a dispatch sends. That of a combine's tangents is float32, and its transpose sends cotangents, which
        were rounded to this type: no bit is lost.
      result_dtype: of the result.
      structure: of the handle.
    """

    name: str
    sizes: tuple[int, int]
    dtype: jnp.dtype
    result_dtype: jnp.dtype
    structure: Any

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the result."""
        return jax.ShapeDtypeStruct((self.sizes[self.name == "dispatch"], x.shape[1]), self.result_dtype)

    def run(self, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        """The rows, or the sums."""
        handle = jax.tree.unflatten(self.structure, leaves)
        if self.name == "dispatch":
            return _dispatch(None, x.astype(self.dtype), handle).astype(self.result_dtype)
        return _combine(x, None, None, handle).astype(self.result_dtype)

    def transposed(self, x: jax.ShapeDtypeStruct) -> _Linear:
        """The other way, back to arrays like ``x``."""
        other = "combine" if self.name == "dispatch" else "dispatch"
        return dataclasses.replace(self, name=other, result_dtype=x.dtype)


def _linear(name: str, handle: Handle, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A tangent's way; see :class:`_Linear`."""
    leaves, structure = jax.tree.flatten(handle)
    result_dtype = jnp.dtype(dtype if name == "dispatch" else jnp.float32)
    sizes = (handle.token_count, math.prod(handle.shape))
    return transposable.apply(_Linear(name, sizes, jnp.dtype(dtype), result_dtype, structure), x, *leaves)


def _sum_of_choices(
    came: jax.Array, weights: jax.Array | None, shape: tuple[int, int], start: jax.Array | None
) -> jax.Array:
    """The sum in float32, in order, of the ``[T*K, H]`` rows of K choices of T tokens, ``shape`` being ``(T, K)``."""
    came = came.reshape(*shape, came.shape[-1])
    total = jnp.zeros_like(came, shape=(shape[0], came.shape[-1]), dtype=jnp.float32) if start is None else start
    for k in range(shape[1]):
        row = came[:, k].astype(jnp.float32)
        total += row if weights is None else weights[:, k, None] * row
    return total


def _layout_of_nodes(
    idx: jax.Array, weights: jax.Array, axis_names: tuple[str, ...], sizes: tuple[int, ...], limits: Limits
) -> Handle:
    """The layout of a dispatch over two axes: tokens to nodes, then :func:`layout` on each node."""
    tokens, k = idx.shape
    (node_axis, device_axis), nodes = axis_names, sizes[0]
    per_node = limits.experts // nodes
    most = min(tokens, limits.capacity // nodes)
    channel = Channel.create(node_axis, nodes, most, min(tokens, tokens * k / nodes))
    relay = Relay.create(jnp.where(idx >= 0, idx // per_node, nodes), channel)

    # Experts travel as their number + 1, so that places without a token name none.
    came_idx = channel.exchange(exchange.take(idx + 1, relay.tokens)) - 1 - lax.axis_index(node_axis) * per_node
    came_weights = channel.exchange(exchange.take(weights, relay.tokens))
    here = (came_idx >= 0) & (came_idx < per_node)
    came_idx, came_weights = jnp.where(here, came_idx, -1), jnp.where(here, came_weights, 0)
    handle = layout(came_idx, came_weights, device_axis, dataclasses.replace(limits, experts=per_node), relay)

    left_out = jnp.sum((idx >= 0) & (relay.places == channel.none), dtype=jnp.int32)
    return dataclasses.replace(handle, dropped=handle.dropped + left_out)


def _check(
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    axis_name: str | tuple[str, str],
    num_experts: int,
    capacity: int | None,
    alignment: int,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the mesh axes, if the arguments of a dispatch fit together; CollectiveError otherwise."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise errors.CollectiveError(f"moe_dispatch: {message}")

    require(
        topk_idx.ndim == 2 and topk_idx.shape[1] > 0 and topk_idx.shape == topk_weights.shape,
        f"topk_idx of shape {topk_idx.shape} and topk_weights of shape {topk_weights.shape} must both be [T, K], K > 0",
    )
    require(
        jnp.issubdtype(topk_idx.dtype, jnp.integer) and jnp.issubdtype(topk_weights.dtype, jnp.floating),
        f"topk_idx of {topk_idx.dtype} must be integers, topk_weights of {topk_weights.dtype} floating-point",
    )
    require(
        isinstance(axis_name, str) or len(axis_name) <= 2, f"{axis_name=} must name one axis or two, (node, device)"
    )
    axis_names, sizes = checks.axes(axis_name, "moe_dispatch")
    ranks = math.prod(sizes)
    require(
        num_experts > 0 and num_experts % ranks == 0,
        f"{num_experts=} is not a multiple of the {ranks} ranks of {axis_names}; "
        f"take {round_up(max(num_experts, 1), ranks)} and leave the last ones unused",
    )
    require(capacity is None or capacity >= ranks, f"{capacity=} is less than one row from each of the {ranks} ranks")
    require(alignment >= 1, f"{alignment=} must be 1 or more")
    return axis_names, sizes
