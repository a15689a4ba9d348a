"""Operations that a program names: reductions, and those with no effect when statements run in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from glass_jax.errors import UnsupportedError
from glass_jax.hw import copies, numerics
from glass_jax.hw import program as ir
from glass_jax.hw.machine import Handler
from glass_jax.hw.storage import PER_UNIT

if TYPE_CHECKING:
    from glass_jax.hw.machine import Machine

# Synchronization, and hints to the scheduler: the model runs statements in the order written.
_WITHOUT_EFFECT = (
    "ascend_get_buf",
    "ascend_pipe_barrier",
    "ascend_rls_buf",
    "ascend_set_flag",
    "ascend_set_mmad_direction",
    "ascend_threadfence",
    "ascend_wait_flag",
    "assume",
    "conflict_hint",
    "stage",
    "task",
)

# For each kind of reduction: over one axis of an array, and of two arrays.
_REDUCTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[[jax.Array, jax.Array], jax.Array]]] = {
    "sum": (lambda x, axis: jnp.sum(x, axis, dtype=x.dtype), jnp.add),
    "max": (jnp.max, jnp.maximum),
    "min": (jnp.min, jnp.minimum),
    "abssum": (lambda x, axis: jnp.sum(jnp.abs(x), axis, dtype=x.dtype), jnp.add),
    "absmax": (lambda x, axis: jnp.max(jnp.abs(x), axis), jnp.maximum),
    "bitand": (lambda x, axis: jnp.bitwise_and.reduce(x, axis), jnp.bitwise_and),
    "bitor": (lambda x, axis: jnp.bitwise_or.reduce(x, axis), jnp.bitwise_or),
    "bitxor": (lambda x, axis: jnp.bitwise_xor.reduce(x, axis), jnp.bitwise_xor),
}


def run_reduce(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Reduces dimension ``dim`` of a region into another region, replacing or joining what that holds (``clear``)."""
    source, target = op.args
    kind, dim = op.attrs["kind"], op.attrs["dim"]
    if kind not in _REDUCTIONS:
        raise UnsupportedError(f"the NPU model does not run the reduction {kind!r} yet")
    along, join = _REDUCTIONS[kind]
    spaces = {machine.memory.buffers[region.buffer].space for region in (source, target)}
    if not spaces <= PER_UNIT:
        raise UnsupportedError(f"the NPU model does not run a reduction in {', '.join(sorted(spaces - PER_UNIT))} yet")
    lead = len(machine.active)
    result = along(copies.read_region(machine, source), dim + 1).reshape(lead, *copies.extents(machine, target))
    result = numerics.convert(result, numerics.dtype(machine.memory.buffers[target.buffer].dtype))
    if not op.attrs["clear"]:
        result = join(copies.read_region(machine, target), result)
    copies.write_region(machine, target, result)


def _no_effect(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Nothing to do."""


HANDLERS: dict[str, Handler] = {"reduce": run_reduce} | dict.fromkeys(_WITHOUT_EFFECT, _no_effect)
