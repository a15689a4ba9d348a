"""Reductions and scans of tiles."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.tiles import copies
from glass_jax.hw.model.values import numerics
from glass_jax.hw.model.values.joining import JOINS

# How a kind of reduction joins, and what it joins.
_REDUCTIONS: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    kind: (kind, lambda x: x) for kind in ("max", "min", "bitand", "bitor", "bitxor")
} | {"sum": ("add", lambda x: x), "abssum": ("add", jnp.abs), "absmax": ("max", jnp.abs)}

_SCANS: dict[str, Callable[..., jax.Array]] = {"sum": lax.cumsum, "max": lax.cummax}


def run_reduce(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Reduces dimension ``dim`` of a region into another region, replacing or joining what that holds (``clear``)."""
    source, target = op.args
    kind, dim = op.attrs["kind"], op.attrs["dim"]
    if kind not in _REDUCTIONS:
        raise UnsupportedError(f"the NPU model does not run the reduction {kind!r} yet")
    name, prepare = _REDUCTIONS[kind]
    join = JOINS[name]
    _check_spaces(machine, source, target)
    reduced = join.along(prepare(copies.read_region(machine, source)), dim + 1)
    result = reduced.reshape(len(machine.active), *copies.extents(machine, target))
    result = numerics.convert(result, numerics.dtype(machine.memory.buffers[target.buffer].dtype))
    if not op.attrs["clear"]:
        result = join.pair(copies.read_region(machine, target), result)
    copies.write_region(machine, target, result)


def run_scan(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Accumulates along dimension ``dim`` of a region, from the other end with ``reverse``, into another region."""
    source, target = op.args
    _check_spaces(machine, source, target)
    scan = _SCANS[op.attrs["kind"]]
    result = scan(copies.read_region(machine, source), axis=op.attrs["dim"] + 1, reverse=op.attrs["reverse"])
    to = numerics.dtype(machine.memory.buffers[target.buffer].dtype)
    copies.write_region(machine, target, numerics.convert(result, to))


def _check_spaces(machine: Machine, *regions: ir.Region) -> None:
    for region in regions:
        if not machine.memory.per_unit(region.buffer):
            space = machine.memory.buffers[region.buffer].space.name
            raise UnsupportedError(
                f"the NPU model does not run a reduction or scan of {region.buffer!r} in {space}, which the vector "
                "units do not have: copy it to UB or to a fragment"
            )
