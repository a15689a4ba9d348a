"""An operation over a mesh: what each device computes of it, however the program says how arrays are spread."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType

from glass_jax import errors


def axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def broadcast(prefix: str, tag: str, shape: Sequence[int], full: Sequence[int]) -> list[str]:
    """Names of leading dimensions that are broadcast to ``full``: one of 1 is a dimension of its own.

    Args:
      prefix: of the names of full dimensions, ``prefix0``, ``prefix1`` and so on, the same for all operands.
      tag: in their place where the operand has 1; another for each operand.
      shape: the operand's, at least as long as ``full``.
      full: the sizes that operands have together.
    """
    return [f"{prefix}{d}" if shape[d] == size else f"{tag}{d}" for d, size in enumerate(full)]


class Sharded(NamedTuple):
    """The shape of a whole array and how it is sharded, one entry a dimension."""

    shape: tuple[int, ...]
    spec: jax.P


class Parts(NamedTuple):
    """What one device computes, and how the operands and the result must be sharded for it.

    Attributes:
      local: the operation on one device's shards; it may use collectives over mesh axes.
      result: spec of the result, or a tuple of one for each.
      operands: spec of each operand.
    """

    local: Callable[..., Any]
    result: jax.P | tuple[jax.P, ...]
    operands: tuple[jax.P, ...]


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The dimensions of an operation's operands and results, by name.

    Attributes:
      rule: in Shardy's notation, for example ``"b s h d, p g d, b n, b -> b s h v, b h s"``.
      parallel: those that devices may share out, for example ``"b h"``: the operation on a part is the operation
        itself, without communication. Every device has the whole of all others.
      summed: those that devices may share out because results that lack them are sums over them: what the operation
        makes of the parts is added up.
    """

    rule: str
    parallel: str
    summed: str = ""

    @property
    def operands(self) -> list[list[str]]:
        """Names of each operand's dimensions."""
        return [term.split() for term in self.rule.partition("->")[0].split(",")]

    @property
    def results(self) -> list[list[str]]:
        """Names of each result's dimensions."""
        return [term.split() for term in self.rule.partition("->")[2].split(",")]

    def specs(self, *given: Sequence) -> tuple[tuple[jax.P, ...], tuple[jax.P, ...]]:
        """How operands and results are to be sharded.

        Args:
          *given: the spec that each operand has; those that the results are wanted in may follow.

        Returns:
          The operands' specs and the results'. A dimension that may be is sharded as the first array that shards it has
          it, unless another dimension has taken one of its mesh axes.
        """
        terms, chosen = [*self.operands, *self.results], self._chosen(given)
        specs = [jax.P(*map(chosen.get, names)) for names in terms]
        return tuple(specs[: len(self.operands)]), tuple(specs[len(self.operands) :])

    def sums(self, *given: Sequence) -> tuple[tuple[str, ...], ...]:
        """For each result the mesh axes that parts of it are added up over; ``given`` as for :meth:`specs`."""
        chosen = self._chosen(given)
        return tuple(
            tuple(axis for name in self.summed.split() if name not in names for axis in axes(chosen.get(name)))
            for names in self.results
        )

    def _chosen(self, given: Sequence[Sequence]) -> dict[str, Any]:
        """How each dimension is sharded that is."""
        taken: set[str] = set()
        chosen: dict[str, Any] = {}
        shared = (*self.parallel.split(), *self.summed.split())
        for names, spec in zip([*self.operands, *self.results], given, strict=False):
            for name, entry in zip(names, spec, strict=False):
                free = name in shared and name not in chosen and taken.isdisjoint(axes(entry))
                if free and entry is not None:
                    chosen[name] = entry
                    taken.update(axes(entry))
        return chosen


class Split(enum.Enum):
    """How a lowering learns over which devices its operands are spread."""

    NONE = "one device, inside shard_map, or whole on each device: the operands are all there is"
    TYPES = "Explicit mesh axes: the types of the operands tell"
    PROPAGATED = "Auto mesh axes: XLA decides, and tells when it partitions the program"


def types_tell(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether types say how arrays are spread over ``mesh``: it has Explicit and Manual axes only."""
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def split_of(ctx: mlir.LoweringRuleContext) -> Split:
    """How the operation that ``ctx`` lowers is split."""
    if any(entry is not None for aval in ctx.avals_in for entry in aval.sharding.spec):
        return Split.TYPES
    if any(types_tell(aval.sharding.mesh) for aval in ctx.avals_in):
        return Split.NONE
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
    fn: Callable[..., Any], rule: str, parts: Callable[..., Parts], split: Split, *operands: jax.Array
) -> Any:
    """``fn(*operands)``, each device computing its part.

    Args:
      fn: the operation on whole arrays.
      rule: its dimensions in Shardy's notation, for example ``"b m k, k n -> b m n"``, by which shardings propagate.
      parts: from a :class:`Sharded` of each operand and the spec that each result is wanted in, what one device does.
      split: how the operands' shardings are known.
      operands: the arrays.
    """
    if split is Split.NONE:
        return fn(*operands)
    if split is Split.TYPES:
        types = [jax.typeof(x) for x in operands]
        mesh = _mesh(*operands)
        undecided = [jax.P(*(None,) * len(names)) for names in Dimensions(rule, "").results]
        part = parts(*(Sharded(t.shape, t.sharding.spec) for t in types), *undecided)
        resharded = [
            jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(operands, part.operands, strict=True)
        ]
        # The all-reduce of a sharded K makes the result invariant; check_vma would need it proven for every callee.
        return jax.shard_map(part.local, mesh=mesh, in_specs=part.operands, out_specs=part.result, check_vma=False)(
            *resharded
        )

    place = source_info_util.current()

    def partition(mesh, operand_shapes, result_shape):
        part = parts(*map(_sharded, operand_shapes), *(_sharded(x).spec for x in jax.tree.leaves(result_shape)))
        results, shardings = jax.tree.map(
            partial(jax.NamedSharding, mesh), (part.result, part.operands), is_leaf=_is_spec
        )
        return mesh, _made_at(place, part.local), results, shardings

    # It wants a plain positional signature, and no constants: they stay inside the jitted function.
    call = custom_partitioning(lambda *args: jax.jit(fn)(*args))
    call.def_partition(partition=partition, sharding_rule=rule)
    return call(*operands)


def _made_at(place: source_info_util.SourceInfo, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, all operations of which count as made at one place of the source.

    XLA keeps the lines of source that operations come from in a table for each program, and takes a part's numbers of
    lines for those of the whole program. Where they are none of these, the lines that it adds when it inlines a call or
    a loop of one step can become their own callers, and it follows them forever (seen with jaxlib 0.10.2). The place
    where the operation itself was made is in both tables.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=moved(value.jaxpr))
        if isinstance(value, Jaxpr):
            return value.replace(eqns=[eqn_at(eqn) for eqn in value.eqns])
        return type(value)(map(moved, value)) if type(value) in (tuple, list) else value

    def eqn_at(eqn: JaxprEqn) -> JaxprEqn:
        source = eqn.source_info.replace(traceback=place.traceback)
        return eqn.replace(params={name: moved(value) for name, value in eqn.params.items()}, source_info=source)

    def run(*operands: jax.Array) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*operands)
        return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(moved(jaxpr))(*operands))

    return run


def _sharded(x: jax.ShapeDtypeStruct) -> Sharded:
    spec = tuple(x.sharding.spec)
    return Sharded(x.shape, jax.P(*spec, *(None,) * (len(x.shape) - len(spec))))


def over_mesh(
    fn: Callable[..., Any],
    dimensions: Dimensions,
    split: Split,
    *operands: jax.Array,
    sum_of_parts: Callable[..., Any],
) -> Any:
    """``fn(*operands)``, an operation that every device does on its part of the dimensions.

    Args:
      fn: the operation.
      dimensions: its dimensions.
      split: how the operands' shardings are known.
      *operands: the arrays.
      sum_of_parts: ``(over, *operands)``, what each device calls instead of ``fn`` where summed dimensions are sharded:
        it adds up what the devices have, each result over the mesh axes that ``over`` has for it.
    """

    def parts(*sharded: Sharded | jax.P) -> Parts:
        given = [x.spec if isinstance(x, Sharded) else x for x in sharded]
        operand_specs, results = dimensions.specs(*given)
        over = dimensions.sums(*given)
        local = partial(sum_of_parts, over) if any(over) else fn
        return Parts(local, results if len(results) > 1 else results[0], operand_specs)

    return partitioned(fn, dimensions.rule, parts, split, *operands)


def by_xla(fn: Callable[..., Any], dimensions: Dimensions, split: Split, *operands: jax.Array) -> Any:
    """``fn(*operands)``, split by XLA itself; over Explicit mesh axes it is told the result's sharding.

    Args:
      fn: the operation, in JAX that XLA splits well.
      dimensions: its dimensions.
      split: how the operands' shardings are known.
      *operands: the arrays.
    """
    if split is not Split.TYPES:
        return fn(*operands)
    mesh = _mesh(*operands)
    _, (result,) = dimensions.specs(*(jax.typeof(x).sharding.spec for x in operands))
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(fn, axes=tuple(explicit), out_sharding=result)(*operands)


def _mesh(*operands: jax.Array) -> jax.sharding.AbstractMesh:
    """The mesh of the operands' types."""
    return next(mesh for x in operands if not (mesh := jax.typeof(x).sharding.mesh).empty)


def _is_spec(x: object) -> bool:
    return isinstance(x, jax.P)
