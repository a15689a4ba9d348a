"""Elements of a buffer read and written by many lanes at once, and the proof that their order does not matter.

A lane is one iteration of a parallel loop nest on one vector unit. Values of lanes are arrays of the lanes' rank,
size 1 along every axis on which they do not depend. Where the indices are affine in the lanes, an access is a slice, a
reshape and a transpose; otherwise it is a gather or a scatter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.hw.model.values.joining import Join
from glass_jax.hw.model.values.storage import slice_at, update_at
from glass_jax.hw.model.values.symbolic import Facts, Linear, strides

Index = Linear | jax.Array


class DependentLanes(Exception):  # noqa: N818  (a signal to run the lanes one after the other, not a failure)
    """Evaluating all lanes at once might not give what one lane after the other gives."""


@dataclasses.dataclass(frozen=True)
class Access:
    """One load or store, as recorded while lanes are evaluated together.

    Attributes:
      storage: the allocation.
      buffer: the view through which it was accessed.
      write: whether it was a store.
      indices: the element of each lane, leading axes of the memory included.
      lanes: extents of the lanes that took part; the first axis, the vector units, counts from the last one back.
      kind: how an atomic joins its value to the element, None for an access whose order may matter.
    """

    storage: str
    buffer: str
    write: bool
    indices: tuple[Index, ...]
    lanes: tuple[int, ...]
    kind: str | None = None


@dataclasses.dataclass(frozen=True)
class _Box:
    """The part of an array that affine lanes touch.

    Attributes:
      starts: first element of each dimension.
      sizes: number of elements from the first to the last.
      steps: distance of neighbours.
      axes: lane axes that each dimension spans, the slowest first.
    """

    starts: tuple[Linear, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]


def _box(indices: Sequence[Index], shape: Sequence[int], lanes: Sequence[int], facts: Facts) -> _Box | None:
    """The box of an access, or None if its indices are not affine, use one axis twice, or may lie outside ``shape``."""
    starts, sizes, steps, axes = [], [], [], []
    for index, size in zip(indices, shape, strict=True):
        if not isinstance(index, Linear):
            return None
        low, high = index.bounds(facts)
        affine = strides(index.pattern)
        if affine is None or low < 0 or high >= size:
            return None
        base, slopes = affine
        order = sorted(slopes, key=lambda axis: -slopes[axis])
        step, inner = slopes[order[-1]] if order else 1, 1
        if step < 0:
            return None
        for axis in reversed(order):
            if slopes[axis] != step * inner:
                return None
            inner *= lanes[axis]
        starts.append(Linear(base, index.terms))
        sizes.append((inner - 1) * step + 1)
        steps.append(step)
        axes.append(tuple(order))
    spanned = [axis for group in axes for axis in group]
    if len(set(spanned)) != len(spanned):
        return None
    return _Box(tuple(starts), tuple(sizes), tuple(steps), tuple(axes))


def take(x: jax.Array, indices: Sequence[Index], poison: np.ndarray, lanes: Sequence[int], facts: Facts) -> jax.Array:
    """``x[indices]`` of every lane; ``poison`` where an index lies outside ``x``.

    Args:
      x: the buffer's contents.
      indices: one a dimension of ``x``.
      poison: an element.
      lanes: extents of the lanes.
      facts: what is known about the indices.

    Returns:
      an array of rank 0, or of the lanes' rank.
    """
    box = _box(indices, x.shape, lanes, facts)
    if box is None:
        positions = [_position(index, size) for index, size in zip(indices, x.shape, strict=True)]
        return x.at[tuple(positions)].get(mode="fill", fill_value=poison[()])
    part = slice_at(x, box.starts, box.sizes)
    if any(step > 1 for step in box.steps):
        part = lax.slice(part, [0] * part.ndim, part.shape, box.steps)
    order = [axis for group in box.axes for axis in group]
    if not order:
        return part.reshape(())
    part = part.reshape([lanes[axis] for axis in order]).transpose(np.argsort(order))
    return part.reshape([size if axis in order else 1 for axis, size in enumerate(lanes)])


def put(
    x: jax.Array,
    indices: Sequence[Index],
    value: jax.Array,
    mask: jax.Array | None,
    lanes: Sequence[int],
    facts: Facts,
    last_wins: bool = False,
) -> jax.Array:
    """``x`` with ``x[indices] = value`` in every lane where ``mask``; elements outside ``x`` are dropped.

    No two lanes write one element, unless ``last_wins``, along whole axes. Arguments as in :func:`take`; ``value`` and
    ``mask`` broadcast to the lanes.

    Raises:
      DependentLanes: the lanes write through one index, so that the last would win.
    """
    if last_wins:
        value, mask = _last_of(indices, value, mask, lanes)
    box = _box(indices, x.shape, lanes, facts)
    if box is None:
        positions = [_position(index, size) for index, size in zip(indices, x.shape, strict=True)]
        full = np.broadcast_shapes(*(np.shape(p) for p in positions))
        if mask is not None:
            full = np.broadcast_shapes(full, mask.shape)
            positions[0] = jnp.where(mask, positions[0], x.shape[0])
        if math.prod(np.broadcast_shapes(full, np.shape(value))) > math.prod(full):
            raise DependentLanes
        return x.at[tuple(positions)].set(value, mode="drop")
    order = [axis for group in box.axes for axis in group]
    for operand in (value, mask):
        if operand is not None and any(n > 1 and axis not in order for axis, n in enumerate(np.shape(operand))):
            raise DependentLanes
    counts = [(size - 1) // step + 1 for size, step in zip(box.sizes, box.steps, strict=True)]
    tile = _arrange(value, order, lanes, counts)
    written = None if mask is None else _arrange(mask, order, lanes, counts)
    if any(step > 1 for step in box.steps):
        # What lies between the elements stays: they are written together with it.
        between = [(0, 0, step - 1) for step in box.steps]
        written = lax.pad(jnp.ones(counts, bool) if written is None else written, np.asarray(False), between)
        tile = lax.pad(tile, np.asarray(0, tile.dtype), between)
    if written is not None:
        tile = jnp.where(written, tile, slice_at(x, box.starts, box.sizes))
    return update_at(x, tile, box.starts)


def _last_of(
    indices: Sequence[Index], value: jax.Array, mask: jax.Array | None, lanes: Sequence[int]
) -> tuple[jax.Array, jax.Array | None]:
    """Along axes on which no index depends, the value of the last lane of the mask, and whether there is one."""
    spanned = np.broadcast_shapes(*((i.pattern if isinstance(i, Linear) else i).shape for i in indices))
    spanned = (1,) * (len(lanes) - len(spanned)) + tuple(spanned)
    for axis, extent in enumerate(spanned):
        if extent > 1:
            continue
        if mask is not None and mask.ndim and mask.shape[axis] > 1:
            count = mask.shape[axis]
            last = count - 1 - jnp.argmax(jnp.flip(mask, axis), axis, keepdims=True)
            if np.ndim(value) and value.shape[axis] > 1:
                shape = [count if a == axis else n for a, n in enumerate(np.broadcast_shapes(value.shape, mask.shape))]
                index = jnp.broadcast_to(last, [1 if a == axis else n for a, n in enumerate(shape)])
                value = jnp.take_along_axis(jnp.broadcast_to(value, shape), index, axis)
            mask = jnp.any(mask, axis, keepdims=True)
        elif np.ndim(value) and value.shape[axis] > 1:
            value = jax.lax.slice_in_dim(jnp.asarray(value), value.shape[axis] - 1, value.shape[axis], axis=axis)
    return value, mask


def join(
    x: jax.Array,
    indices: Sequence[Index],
    value: jax.Array,
    mask: jax.Array | None,
    lanes: Sequence[int],
    facts: Facts,
    kind: Join,
) -> jax.Array:
    """``x`` whose ``x[indices]`` has joined the value of every lane where ``mask``; elements outside ``x`` are dropped.

    Arguments as in :func:`put`. Lanes that name one element all count; the order in which they do is not defined.
    """
    value = jnp.broadcast_to(value, lanes)
    if mask is not None:
        value = jnp.where(mask, value, kind.identity(x.dtype))
    box = _box(indices, x.shape, lanes, facts)
    if box is None or any(step > 1 for step in box.steps):
        positions = [jnp.broadcast_to(_position(i, size), lanes) for i, size in zip(indices, x.shape, strict=True)]
        return kind.scatter(x, tuple(positions), value)
    order = [axis for group in box.axes for axis in group]
    others = tuple(axis for axis in range(len(lanes)) if axis not in order)
    if others:
        value = jnp.expand_dims(kind.along(value, others), others)
    tile = _arrange(value, order, lanes, box.sizes)
    return update_at(x, kind.pair(slice_at(x, box.starts, box.sizes), tile), box.starts)


def join_in_order(
    x: jax.Array, indices: Sequence[Index], value: jax.Array, mask: jax.Array | None, lanes: Sequence[int], kind: Join
) -> tuple[jax.Array, jax.Array]:
    """As :func:`join`, one lane after the other, and what each lane's element was before."""
    count = math.prod(lanes)
    positions = [jnp.broadcast_to(_position(i, size), lanes) for i, size in zip(indices, x.shape, strict=True)]
    if mask is not None:
        positions[0] = jnp.where(mask, positions[0], x.shape[0])

    def step(x: jax.Array, lane: tuple[list[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, new = lane
        old = x.at[tuple(place)].get(mode="fill", fill_value=0)
        return x.at[tuple(place)].set(kind.pair(old, new), mode="drop"), old

    flat = [position.reshape(count) for position in positions]
    x, old = lax.scan(step, x, (flat, jnp.broadcast_to(value, lanes).reshape(count)))
    return x, old.reshape(lanes)


def _arrange(value: jax.Array, order: Sequence[int], lanes: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """``value`` of the lanes laid out as the box they write."""
    if np.ndim(value) == 0:
        return jnp.broadcast_to(value, sizes)
    full = jnp.broadcast_to(value, [size if axis in order else 1 for axis, size in enumerate(lanes)])
    kept = full.reshape([lanes[axis] for axis in sorted(order)])
    return kept.transpose([sorted(order).index(axis) for axis in order]).reshape(sizes)


def _position(index: Index, size: int) -> jax.Array | np.ndarray:
    """An index for gather and scatter, which take a negative number as counted from the end: moved beyond the end."""
    position = index.traced() if isinstance(index, Linear) else index
    return jnp.where(position < 0, size, position)


# --- independence ---------------------------------------------------------------------------------------------------


def check_independent(log: Sequence[Access], lanes: tuple[int, ...], since: int, in_order: bool) -> None:
    """Raises DependentLanes unless lanes evaluated together do the same as one lane after the other.

    They do if no lane touches an element that another writes. They also do where an earlier lane's access to an element
    comes before a later lane's: so it does if the lanes run one after the other. That can only be told if the log has
    every access once, in the order in which it was made (``in_order``).

    Two lanes cannot meet where, in some dimension, every access of the allocation has the same traced part, one that
    does not change while the lanes run (all its symbols are older than ``since``), and patterns that differ.
    Dimensions whose accesses are not comparable in this way prove nothing.
    """
    for storage in {access.storage for access in log if access.write}:
        accesses = [access for access in log if access.storage == storage]
        kinds = {access.kind for access in accesses}
        if len(kinds) == 1 and None not in kinds:
            continue  # joined in whatever order
        if len({access.buffer for access in accesses}) > 1:
            raise DependentLanes
        _check_storage(accesses, lanes, since, in_order)


def _check_storage(accesses: list[Access], lanes: tuple[int, ...], since: int, in_order: bool) -> None:
    comparable = [
        dimension
        for dimension in range(len(accesses[0].indices))
        if all(isinstance(i, Linear) and i.born < since for i in (access.indices[dimension] for access in accesses))
        and len({access.indices[dimension].key for access in accesses}) == 1
    ]
    # Most accesses are alike: those with the same patterns count once.
    distinct = {}
    for access in accesses:
        patterns = [access.indices[dimension].pattern for dimension in comparable]
        distinct[access.lanes, *((pattern.shape, pattern.tobytes()) for pattern in patterns)] = access
    elements, numbers, _ = _meetings(list(distinct.values()), lanes, comparable)
    pairs = np.unique(elements * math.prod(lanes) + numbers)
    if len(np.unique(pairs // math.prod(lanes))) != len(pairs):
        if not in_order:
            raise DependentLanes
        _check_order(accesses, *_meetings(accesses, lanes, comparable))


def _meetings(
    accesses: list[Access], lanes: tuple[int, ...], comparable: list[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Every element touched, as a number; the lane that did it; where in these arrays each further access begins."""
    columns = []
    for access in accesses:
        # The lanes in question come first; further ones belong to a loop inside, and count as one.
        inner = (1,) * (len(access.lanes) - len(lanes))
        numbers = np.arange(math.prod(lanes)).reshape(lanes + inner)[-access.lanes[0] :]
        patterns = [np.broadcast_to(access.indices[d].pattern, access.lanes).ravel() for d in comparable]
        columns.append(np.stack([*patterns, np.broadcast_to(numbers, access.lanes).ravel()]))
    table = np.concatenate(columns, axis=1)
    # Patterns as one number each, so that uniqueness is a sort of integers.
    elements = np.zeros(table.shape[1], np.int64)
    for row in table[:-1]:
        elements = elements * (int(row.max() - row.min()) + 1) + (row - row.min())
    return elements, table[-1], list(np.cumsum([column.shape[1] for column in columns])[:-1])


def _check_order(accesses: list[Access], elements: np.ndarray, numbers: np.ndarray, starts: list[int]) -> None:
    """Raises DependentLanes if one lane's access comes after a later lane's, or lanes write one element together."""
    _, elements = np.unique(elements, return_inverse=True)
    read, written = (np.full(elements.max() + 1, -1) for _ in range(2))
    for access, touched, by in zip(accesses, np.split(elements, starts), np.split(numbers, starts), strict=True):
        latest = np.maximum(read, written)[touched] if access.write else written[touched]
        if (by < latest).any() or (access.write and len(np.unique(touched)) != len(np.unique([touched, by], axis=1).T)):
            raise DependentLanes
        np.maximum.at(written if access.write else read, touched, by)
