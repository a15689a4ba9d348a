"""Checks of a collective's arguments, before anything is compiled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from glass_jax import errors
from glass_jax.sharding.algorithms import ALGORITHMS

AxisName = str | tuple[str, ...]


def axes(axis_name: AxisName, collective: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The mesh axes that a collective runs over, and their extents.

    Raises:
      CollectiveError: an axis is not bound here, or named twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not names or len(set(names)) < len(names):
        raise errors.CollectiveError(f"{collective}: {axis_name=} must name at least one axis, and each axis once")
    sizes = []
    for name in names:
        try:
            sizes.append(lax.axis_size(name))
        except NameError:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            here = f"the axes here are {', '.join(map(repr, manual))}" if manual else "there are none here"
            raise errors.CollectiveError(
                f"{collective}: there is no mesh axis {name!r}; {here}. Call it inside jax.shard_map or "
                "SimulatedMesh.shard_map over a mesh with an axis of that name"
            ) from None
    return names, tuple(sizes)


def algorithm(collective: str, name: str) -> None:
    """Raises CollectiveError unless ``name`` is ``"auto"``, ``"xla"`` or an algorithm of the collective."""
    known = ("auto", "xla", *ALGORITHMS[collective])
    if name not in known:
        raise errors.CollectiveError(f"{collective} has no algorithm {name!r}; it has {', '.join(known)}")


def blocks(shape: Sequence[int], ranks: int, collective: str) -> None:
    """Raises CollectiveError unless the first dimension can be cut into one block a rank."""
    if not shape:
        raise errors.CollectiveError(
            f"{collective} cuts its first dimension into {ranks} blocks, and a scalar has none"
        )
    if shape[0] % ranks:
        padded = -(-shape[0] // ranks) * ranks
        raise errors.CollectiveError(
            f"{collective} of {tuple(shape)} over {ranks} ranks: the first dimension, {shape[0]}, is not a multiple of "
            f"{ranks}; pad it to {padded}"
        )


def integer(value: Any, name: str) -> int:
    """``value`` as an integer.

    Raises:
      CollectiveError: its type is not that of an integer: ``64e6`` is a float.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise errors.CollectiveError(f"{name} is {value!r}, a {type(value).__name__}; it must be an integer") from None


def root(rank: int, ranks: int, collective: str) -> None:
    """Raises CollectiveError unless ``rank`` is one of ``ranks``."""
    if not 0 <= rank < ranks:
        raise errors.CollectiveError(f"{collective}: root {rank} is not a rank; the ranks are 0 to {ranks - 1}")


def permutation(pairs: Sequence[tuple[int, int]], ranks: int) -> np.ndarray:
    """The destination of each rank, -1 where none.

    Args:
      pairs: (source, destination), no rank twice on the same side.
      ranks: P.

    Raises:
      CollectiveError: a rank is out of range, or twice a source, or twice a destination.
    """
    dst = np.full(ranks, -1, np.int32)
    source_of: dict[int, int] = {}
    for source, target in pairs:
        if not (0 <= source < ranks and 0 <= target < ranks):
            raise errors.CollectiveError(
                f"send_recv: {source} -> {target} is not between ranks; they are 0 to {ranks - 1}"
            )
        if dst[source] >= 0:
            raise errors.CollectiveError(
                f"send_recv: rank {source} sends twice, to {dst[source]} and {target}; a rank sends to one rank a call"
            )
        if target in source_of:
            raise errors.CollectiveError(
                f"send_recv: rank {target} is sent to twice, by {source_of[target]} and {source}; a "
                "rank receives from one a call"
            )
        dst[source], source_of[target] = target, source
    return dst
