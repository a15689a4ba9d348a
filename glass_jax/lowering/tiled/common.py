"""What every operation needs to reach its kernel: an implementation to run it, padding, and a split over a mesh."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir

from glass_jax import config, errors
from glass_jax.lowering import artifact, ascend, npu_model

_RUNNERS = {"npu_model": npu_model.call, "ascend": ascend.call}


def run(kernel: artifact.Kernel, *operands: jax.Array, implementation: str, chip: str) -> tuple[jax.Array, ...]:
    """The results of ``kernel`` by ``implementation``, ``"npu_model"`` or ``"ascend"``."""
    return _RUNNERS[implementation](kernel, *operands, chip=chip)


def next_multiple(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``x`` with zeros appended up to ``shape``; ``x`` itself if it has that shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def say_padding(name: str, sizes: dict[str, int], padded: dict[str, int]) -> None:
    """With ``debug`` on, says what of the operation ``name`` is padded for the hardware."""
    if config.current().debug:
        changes = [f"{dim.upper()} {size} -> {padded[dim]}" for dim, size in sizes.items() if padded[dim] != size]
        print(f"glass: {name} {sizes}: padding {', '.join(changes) or 'none'}", file=sys.stderr, flush=True)


class Sharded(NamedTuple):
    """The shape of a whole array and how it is sharded, one entry a dimension."""

    shape: tuple[int, ...]
    spec: jax.P


class Parts(NamedTuple):
    """What one device computes, and how the operands and the result must be sharded for it.

    Attributes:
      local: the operation on one device's shards; it may use collectives over mesh axes.
      result: spec of the result.
      operands: spec of each operand.
    """

    local: Callable[..., jax.Array]
    result: jax.P
    operands: tuple[jax.P, ...]


class Split(enum.Enum):
    """How a lowering learns over which devices its operands are spread."""

    NONE = "one device, or inside shard_map: the operands are all there is"
    TYPES = "Explicit mesh axes: the types of the operands tell"
    PROPAGATED = "Auto mesh axes: XLA decides, and tells when it partitions the program"


def split_of(ctx: mlir.LoweringRuleContext) -> Split:
    """How the operation that ``ctx`` lowers is split."""
    if any(entry is not None for aval in ctx.avals_in for entry in aval.sharding.spec):
        return Split.TYPES
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, mlir.SPMDAxisContext):
        manual = set(axis_context.manual_axes) == set(axis_context.mesh.axis_names)
        return Split.NONE if manual else Split.PROPAGATED
    return Split.PROPAGATED if axis_context.num_devices > 1 else Split.NONE


def check_ascend(name: str, implementation: str, platform_default: str, split: Split) -> None:
    """Raises UnsupportedError if ``implementation`` is ``"ascend"`` and cannot be lowered here.

    Args:
      name: the operation, for the message.
      implementation: what was asked for.
      platform_default: the default implementation of the platform that is being lowered for.
      split: how the operands are spread over devices.
    """
    if implementation != "ascend":
        return
    if platform_default != "ascend":
        raise errors.UnsupportedError(
            f'{name}: implementation="ascend" runs on an Ascend NPU only. Lower it for one with glass.export(fn, '
            '*args, path=...), or run the same kernel here with implementation="npu_model"'
        )
    if split is Split.PROPAGATED:
        raise errors.UnsupportedError(
            f"{name}: XLA cannot split an Ascend kernel over a mesh with Auto axes. Use a mesh with Explicit axes, or "
            "jax.shard_map, so that the program itself says what each device computes"
        )


def partitioned(
    fn: Callable[..., jax.Array], rule: str, parts: Callable[..., Parts], split: Split, *operands: jax.Array
) -> jax.Array:
    """``fn(*operands)``, each device computing its part.

    Args:
      fn: the operation on whole arrays.
      rule: its dimensions in Shardy's notation, for example ``"b m k, k n -> b m n"``, by which shardings propagate.
      parts: from a :class:`Sharded` of each operand and of the result, what one device does.
      split: how the operands' shardings are known.
      operands: the arrays.
    """
    if split is Split.NONE:
        return fn(*operands)
    if split is Split.TYPES:
        result = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
        types = [jax.typeof(x) for x in operands]
        part = parts(
            *(Sharded(t.shape, t.sharding.spec) for t in types), Sharded(result.shape, jax.P(*(None,) * result.ndim))
        )
        mesh = next(t.sharding.mesh for t in types if not t.sharding.mesh.empty)
        resharded = [
            jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(operands, part.operands, strict=True)
        ]
        # The all-reduce of a sharded K makes the result invariant; check_vma would need it proven for every callee.
        return jax.shard_map(part.local, mesh=mesh, in_specs=part.operands, out_specs=part.result, check_vma=False)(
            *resharded
        )

    def partition(mesh, operand_shapes, result_shape):
        part = parts(*map(_sharded, (*operand_shapes, result_shape)))
        shardings = tuple(jax.NamedSharding(mesh, spec) for spec in part.operands)
        return mesh, part.local, jax.NamedSharding(mesh, part.result), shardings

    call = custom_partitioning(lambda *args: fn(*args))  # it wants a plain positional signature
    call.def_partition(partition=partition, sharding_rule=rule)
    return call(*operands)


def _sharded(x: jax.ShapeDtypeStruct) -> Sharded:
    spec = tuple(x.sharding.spec)
    return Sharded(x.shape, jax.P(*spec, *(None,) * (len(x.shape) - len(spec))))
