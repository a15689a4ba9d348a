"""A collective as a JAX primitive: one linear map of one array, its transpose another collective.

Nothing of the schedule is differentiated or batched step by step. The transpose is again a collective, with its own schedule
and its sums in float32; under ``vmap`` over an axis of the collective, the ranks become a dimension of the operand, and the
primitive remembers it. The jaxpr of a model shows its collectives, with their algorithms, as single equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from glass_jax import errors
from glass_jax.sharding import algorithms
from glass_jax.sharding.execute import AxisName, execute, permute

TRANSPOSES = {
    "all_reduce": "all_reduce",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}
_RANKS = "glass_ranks"  # the vmapped axis of a simulation


@dataclasses.dataclass(frozen=True)
class Call:
    """Static parameters of a collective.

    Attributes:
      collective: a key of ``TRANSPOSES``. A reduce gives zeros on every rank but the root.
      algorithm: one of the collective's, or ``"xla"``.
      axes: the mesh axes it runs over.
      ranks: how many ranks there are along them.
      accumulate: name of the dtype that sums are formed in.
      root: of a broadcast or reduce.
      dst: of a send_recv, the destination of each rank, -1 where none.
      levels: of ``"hierarchical"``.
      invariant: whether the result's type says that it is equal on all ranks (``check_vma=True``).
      simulated: what the operand's leading dimensions are: names of simulated mesh axes, or None for a batch.
    """

    collective: str
    algorithm: str
    axes: tuple[str, ...]
    ranks: int
    accumulate: str
    root: int = 0
    dst: tuple[int, ...] | None = None
    levels: tuple[int, ...] | None = None
    invariant: bool = False
    simulated: tuple[str | None, ...] = ()

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the result for an operand of ``shape``: all_gather adds a dimension for the ranks, reduce_scatter removes it."""
        lead, rest = shape[: len(self.simulated)], shape[len(self.simulated) :]
        match self.collective:
            case "all_gather":
                return (*lead, self.ranks, *rest)
            case "reduce_scatter":
                return (*lead, *rest[1:])
        return shape

    def transposed(self) -> Call:
        """The transposed linear map, as a collective whose result varies over the axes."""
        dst = None if self.dst is None else tuple(_inverse(np.asarray(self.dst)).tolist())
        return dataclasses.replace(self, collective=TRANSPOSES[self.collective], dst=dst, invariant=False)


def _inverse(dst: np.ndarray) -> np.ndarray:
    sources = np.full(len(dst), -1, dst.dtype)
    sources[dst[dst >= 0]] = np.flatnonzero(dst >= 0)
    return sources


def _one_rank(x: jax.Array, call: Call, axis_name: AxisName, simulated: bool) -> jax.Array:
    """A rank's result: ``x`` and it have no leading dimensions."""
    shape = dataclasses.replace(call, simulated=()).result_shape(x.shape)
    if not x.size:
        return jnp.zeros_like(x, shape=shape)
    if call.collective == "send_recv":
        dst = np.asarray(call.dst)
        received = permute(x, dst, axis_name, simulated=simulated)
        receives = jnp.asarray(_inverse(dst) >= 0)[lax.axis_index(axis_name)]
        return jnp.where(receives, received, jnp.zeros_like(x))
    if call.algorithm == "xla":
        return _of_xla(x, call, axis_name).reshape(shape)
    schedule = algorithms.build(call.collective, call.algorithm, call.ranks, root=call.root, levels=call.levels)
    blocks = call.ranks if call.collective in ("reduce_scatter", "all_to_all") else 1
    x_blocks = x.reshape(blocks, -1)
    size, chunks = x_blocks.shape[1], schedule.placed.count // blocks
    chunk = -(-size // chunks)
    if padding := chunks * chunk - size:
        x_blocks = jnp.pad(x_blocks, ((0, 0), (0, padding)))
    buffer = x_blocks.reshape(schedule.placed.count, chunk)
    result = execute(schedule, buffer, axis_name, simulated=simulated, accumulate=jnp.dtype(call.accumulate))
    blocks = call.ranks if call.collective in ("all_gather", "all_to_all") else 1
    result = result.reshape(blocks, -1)
    result = (result[:, :size] if padding else result).reshape(shape)
    if call.collective == "reduce":
        result = jnp.where(lax.axis_index(axis_name) == call.root, result, jnp.zeros_like(result))
    return result


def _of_xla(x: jax.Array, call: Call, axis_name: AxisName) -> jax.Array:
    """JAX's own collective."""
    match call.collective:
        case "all_reduce":
            return lax.psum(x.astype(call.accumulate), axis_name).astype(x.dtype)
        case "reduce_scatter":
            return lax.psum_scatter(x.astype(call.accumulate), axis_name).astype(x.dtype)
        case "all_gather":
            return lax.all_gather(x, axis_name)
        case "all_to_all":
            return lax.all_to_all(x, axis_name, 0, 0)
    is_root = lax.axis_index(axis_name) == call.root
    if call.collective == "reduce":
        total = lax.psum(x.astype(call.accumulate), axis_name).astype(x.dtype)
        return jnp.where(is_root, total, jnp.zeros_like(total))
    bits = x if x.dtype == bool else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")  # adding zeros keeps every bit
    return lax.bitcast_convert_type(lax.psum(jnp.where(is_root, bits, jnp.zeros_like(bits)), axis_name), x.dtype)


@functools.partial(jax.jit, static_argnames="call")
def _run(x: jax.Array, call: Call) -> jax.Array:
    """The program of all ranks that ``x`` has dimensions for."""
    here = [dim for dim, name in enumerate(call.simulated) if name in call.axes]
    others = len(call.simulated) - len(here)
    if not here:
        program = functools.partial(_one_rank, call=call, axis_name=call.axes, simulated=False)
    elif len(here) < len(call.axes):
        raise errors.UnsupportedError(
            f"{call.collective} over {call.axes}: {[call.simulated[dim] for dim in here]} are simulated and the others are axes "
            "of a device mesh; a collective runs over one kind"
        )
    else:
        program = functools.partial(_one_rank, call=call, axis_name=_RANKS, simulated=True)
        program = jax.vmap(program, axis_name=_RANKS, axis_size=call.ranks)
        order = sorted(here, key=lambda dim: call.axes.index(call.simulated[dim]))
        x = jnp.moveaxis(x, order, range(others, others + len(order)))
        sizes = x.shape[others : others + len(order)]
        x = x.reshape(*x.shape[:others], call.ranks, *x.shape[len(call.simulated) :])
    for _ in range(others):
        program = jax.vmap(program)
    result = program(x)
    if here:
        result = result.reshape(*result.shape[:others], *sizes, *result.shape[others + 1 :])
        result = jnp.moveaxis(result, range(others, others + len(order)), order)
    return result


collective_p = Primitive("glass_collective")


def _abstract_eval(x: jax.core.ShapedArray, *, call: Call) -> jax.core.ShapedArray:
    mat = x.manual_axis_type
    varying = mat.varying - set(call.axes) if call.invariant else mat.varying
    return x.update(shape=call.result_shape(x.shape), manual_axis_type=mat.update(varying=varying))


def _batch(axis_data, operands, dims, *, call: Call):
    """An axis of the collective becomes a dimension of its ranks; any other axis, of a batch."""
    (x,), (dim,) = operands, dims
    name = axis_data.name if axis_data.name in call.axes else None
    if dim is None:
        if name is None:
            return collective_p.bind(x, call=call), None
        x, dim = jnp.broadcast_to(x, (axis_data.size, *x.shape)), 0
    call = dataclasses.replace(call, simulated=(name, *call.simulated))
    return collective_p.bind(jnp.moveaxis(x, dim, 0), call=call), 0


def _transpose(ct, x, *, call: Call):
    if isinstance(ct, ad.Zero):
        return (ad.Zero(x.aval),)
    if not call.invariant:
        return (collective_p.bind(ct, call=call.transposed()),)
    ct = lax.pcast(ct, call.axes, to="varying")  # equal everywhere, so there is nothing to send
    if call.collective == "broadcast":
        ct = jnp.where(lax.axis_index(call.axes) == call.root, ct, jnp.zeros_like(ct))
    return (ct,)


collective_p.def_impl(_run)
collective_p.def_abstract_eval(_abstract_eval)
ad.deflinear2(collective_p, _transpose)
batching.fancy_primitive_batchers[collective_p] = _batch
mlir.register_lowering(collective_p, mlir.lower_fun(_run, multiple_results=False))
