"""Post and wait: communication behind computation, with an order that transformations keep.

    pending = post_all_reduce(x, "x")
    y = compute(...)                        # does not need x's sum
    total, y = wait(pending, y)

A compiler is free to run a collective anywhere between its operand and its first use. Passing both through ``wait``
says where that first use is: whatever follows needs the computation as well, so a compiler that splits collectives into
start and done has the whole computation to hide the communication behind, and no reason to wait before it. The tie is
data dependence: it lasts through ``jit``, ``scan`` (a Pending may be carried), ``vmap`` and ``grad``, whose backward
pass has the transposed collective between the transposed wait and post.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from glass_jax.sharding import collectives
from glass_jax.sharding.execute import AxisName


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A collective that was posted, a pytree.

    Attributes:
      value: its result, for :func:`wait` to give out.
      collective: its name.
    """

    value: jax.Array
    collective: str = dataclasses.field(metadata={"static": True})


def wait(pending: Pending, *work: Any) -> Any:
    """The result of a posted collective, once it and ``work`` are there.

    Args:
      pending: from one of the ``post_*`` functions.
      *work: pytrees computed since; use what is returned in their place.

    Returns:
      The result, or ``(result, *work)`` if there is work.

    Raises:
      TypeError: ``pending`` is not a Pending.
    """
    if not isinstance(pending, Pending):
        raise TypeError(f"wait takes what a post_* function returned, got {type(pending).__name__}")
    result = lax.optimization_barrier((pending.value, *work))
    return result if work else result[0]


def _after(x: ArrayLike, after: Any) -> ArrayLike:
    """``x``, once ``after`` is there."""
    return x if after is None else lax.optimization_barrier((x, after))[0]


def post_all_reduce(x: ArrayLike, axis_name: AxisName, *, after: Any = None, **options: Any) -> Pending:
    """Posts :func:`collectives.all_reduce`, which see for ``options``, once ``after``, a pytree, is there."""
    return Pending(collectives.all_reduce(_after(x, after), axis_name, **options), "all_reduce")


def post_broadcast(x: ArrayLike, axis_name: AxisName, *, after: Any = None, **options: Any) -> Pending:
    """Posts :func:`collectives.broadcast`, which see for ``options``, once ``after``, a pytree, is there."""
    return Pending(collectives.broadcast(_after(x, after), axis_name, **options), "broadcast")


def post_all_gather(x: ArrayLike, axis_name: AxisName, *, after: Any = None, **options: Any) -> Pending:
    """Posts :func:`collectives.all_gather`, which see for ``options``, once ``after``, a pytree, is there."""
    return Pending(collectives.all_gather(_after(x, after), axis_name, **options), "all_gather")


def post_reduce_scatter(x: ArrayLike, axis_name: AxisName, *, after: Any = None, **options: Any) -> Pending:
    """Posts :func:`collectives.reduce_scatter`, which see for ``options``, once ``after``, a pytree, is there."""
    return Pending(collectives.reduce_scatter(_after(x, after), axis_name, **options), "reduce_scatter")


def post_all_to_all(x: ArrayLike, axis_name: AxisName, *, after: Any = None, **options: Any) -> Pending:
    """Posts :func:`collectives.all_to_all`, which see for ``options``, once ``after``, a pytree, is there."""
    return Pending(collectives.all_to_all(_after(x, after), axis_name, **options), "all_to_all")


def post_send_recv(
    x: ArrayLike, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, after: Any = None, **options: Any
) -> Pending:
    """Posts :func:`collectives.send_recv`, which see for ``perm``, once ``after``, a pytree, is there."""
    return Pending(collectives.send_recv(_after(x, after), axis_name, perm, **options), "send_recv")
