"""What every operation shares as a JAX primitive: its rules registered together, its implementation chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from glass_jax import config, errors
from glass_jax.lowering import partition
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """Static parameters that every operation has; its own are fields of a subclass.

    Attributes:
      implementation: ``"xla"``, ``"npu_model"``, ``"ascend"`` or None: the platform's.
      chip: the chip that tiles are chosen for.
      alignment: ``"pad"`` or ``"strict"``.
    """

    implementation: str | None = None
    chip: str = "950DT"
    alignment: str = "pad"

    @classmethod
    def chosen(cls, implementation: str | None, **statics: Any) -> Self:
        """The parameters of a call: ``implementation`` if the caller named one, the rest from ``glass.configure``.

        Raises:
          ValueError: there is no such implementation.
        """
        options = config.current()
        config.check_implementation(implementation)
        return cls(
            implementation=implementation or options.implementation,
            chip=options.chip,
            alignment=options.alignment,
            **statics,
        )


class Operation:
    """A JAX primitive and all its rules.

    Every rule takes the static parameters as one keyword, ``params``. A rule that returns one array returns a tuple of
    arrays if the operation has several results.

    Args:
      name: the operation's public name; its primitive is ``glass_<name>``.
      abstract_eval: ``(*avals, params) -> jax.ShapeDtypeStruct``, after every check that shapes and dtypes allow. How
        the result is sharded follows from ``dimensions``.
      dimensions: ``(*avals, params) -> partition.Dimensions``: how all implementations are split over a mesh.
      formula: ``(*operands, params) -> array``, the implementation ``"xla"``.
      tiled: ``(*operands, params) -> array``, the implementations that run the tile kernel, told apart by
        ``params.implementation``. Like the formula it sees the arrays of one device.
      batch: rule of ``vmap``, ``(operands, dims, params) -> (array, dim)``.
      multiple_results: whether the operation has several results.
      derivative: ``(*operands, params) -> array``, the operation in JAX that has derivatives. They become the
        operation's; the value stays the implementation's.
      jvp: rule of forward differentiation, where ``derivative`` does not serve.
      transpose: rule of reverse differentiation of the linear part, or None.
      sum_of_parts: ``(fn, over, *operands, params) -> array``: the result where devices share out summed dimensions,
        added up over mesh axes (for each result those in ``over``). ``fn`` is the formula or the kernel. By default
        parts have the type that products are summed in, and their sum is rounded to ``params.out_dtype``.
      formula_by_xla: the formula is JAX that XLA splits over a mesh as well as we could, so that it is left to it.
    """

    def __init__(
        self,
        name: str,
        *,
        abstract_eval: Callable,
        dimensions: Callable[..., partition.Dimensions],
        formula: Callable,
        tiled: Callable,
        batch: Callable,
        multiple_results: bool = False,
        derivative: Callable | None = None,
        jvp: Callable | None = None,
        transpose: Callable | None = None,
        sum_of_parts: Callable | None = None,
        formula_by_xla: bool = False,
    ):
        self.name = name
        self._abstract_eval, self._dimensions = abstract_eval, dimensions
        self._formula, self._tiled = formula, tiled
        self._sum_of_parts, self._formula_by_xla = sum_of_parts or _rounded_sum, formula_by_xla
        self.primitive = p = Primitive(f"glass_{name}")
        p.multiple_results = multiple_results
        p.def_impl(jax.jit(functools.partial(_rebind, p), static_argnames=("params", "devices")))
        p.def_abstract_eval(_without_devices(self._abstract))
        batching.primitive_batchers[p] = _without_devices(batch)
        if derivative is not None:
            jvp = functools.partial(self._differentiate, derivative)
        if jvp is not None:
            ad.primitive_jvps[p] = _without_devices(functools.partial(_placed_tangents, jvp))
        if transpose is not None:
            ad.primitive_transposes[p] = _without_devices(functools.partial(_placed_gradients, transpose))
        mlir.register_lowering(p, functools.partial(self._lower, default="xla"))
        mlir.register_lowering(p, functools.partial(self._lower, default="ascend"), platform="ascend")

    def bind(self, *operands: jax.Array, params: Params) -> Any:
        """Applies the operation to operands that vary over the same manual mesh axes, made so where they do not."""
        # Where types tell, no lowering needs the devices, and there may be none: the mesh may be an AbstractMesh.
        may_ask = not partition.types_tell(jax.sharding.get_abstract_mesh())
        asks = may_ask and not (self._formula_by_xla and params.implementation not in ("npu_model", "host"))
        devices = _asks_for_devices() if asks else None
        out = self.primitive.bind(*axes.vary_alike(*operands), params=params, devices=devices)
        return tuple(out) if self.primitive.multiple_results else out

    def _abstract(self, *avals, params: Any):
        """The abstract results: over Explicit axes sharded by the operation's dimensions, varying as operands do."""
        types = jax.tree.leaves(self._abstract_eval(*avals, params=params))
        if params.implementation in config.KERNEL_IMPLEMENTATIONS:
            _check_float64(self.name, params.implementation, *avals, *types)
        _, specs = self._dimensions(*avals, params=params).specs(*(aval.sharding.spec for aval in avals))
        mesh = next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), avals[0].sharding.mesh)
        results = [
            avals[0].update(shape=t.shape, dtype=t.dtype, weak_type=False, sharding=jax.NamedSharding(mesh, spec))
            for t, spec in zip(types, specs, strict=True)
        ]
        return results if self.primitive.multiple_results else results[0]

    def _differentiate(self, derivative: Callable, primals, tangents, *, params: Any):
        """``jvp`` from a differentiable form of the operation; its value is dead code there."""
        out = self.bind(*primals, params=params)
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0]

        def of_moving(*values):
            operands = list(primals)
            for position, value in zip(moving, values, strict=True):
                operands[position] = value
            given = [jax.typeof(x) for x in operands]
            dimensions = dataclasses.replace(self._dimensions(*given, params=params), summed="")
            specs, _ = dimensions.specs(*(aval.sharding.spec for aval in given))
            return derivative(*map(axes.placed, operands, specs), params=params)

        if not moving:
            return out, jax.tree.map(lambda x: ad.Zero(jax.typeof(x).to_tangent_aval()), out)
        _, out_dot = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
        return out, out_dot

    def _lower(self, ctx: mlir.LoweringRuleContext, *operands, params: Any, devices: object, default: str):
        implementation = params.implementation or default
        split = partition.split_of(ctx)
        partition.check_ascend(self.name, implementation, default, split)
        params = dataclasses.replace(params, implementation=implementation)
        chosen = self._formula if implementation == "xla" else self._tiled
        fn = functools.partial(chosen, params=params)
        dimensions = self._dimensions(*ctx.avals_in, params=params)
        if implementation == "xla" and self._formula_by_xla:
            fn = functools.partial(partition.by_xla, fn, dimensions, split)
        else:
            sums = functools.partial(self._sum_of_parts, chosen, params=params)
            fn = functools.partial(partition.over_mesh, fn, dimensions, split, sum_of_parts=sums)
        # Inside shard_map operands vary over mesh axes, and the carries of a loop would have to start as such: what a
        # formula computes is of one device, whatever the others do.
        ctx = ctx.replace(avals_in=[_invariant(aval) for aval in ctx.avals_in])
        return mlir.lower_fun(fn, multiple_results=self.primitive.multiple_results)(ctx, *operands)


def _rounded_sum(fn: Callable, over: tuple[tuple[str, ...], ...], *operands: jax.Array, params: Any) -> jax.Array:
    """``fn`` of parts, added up over mesh axes in the type that products are summed in, then rounded."""
    wide = dataclasses.replace(params, out_dtype=accumulator(params.out_dtype))
    return lax.psum(fn(*operands, params=wide), over[0]).astype(params.out_dtype)


def _invariant(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype, aval.weak_type, sharding=aval.sharding)


def _placed_tangents(rule: Callable, primals, tangents, *, params: Any):
    """``rule`` of forward differentiation; over Explicit axes tangents are sharded as the results are."""
    out, out_dot = rule(primals, tangents, params=params)

    def place(x, tangent):
        return tangent if isinstance(tangent, ad.Zero) else axes.placed(tangent, jax.typeof(x).sharding.spec)

    return out, jax.tree.map(place, out, out_dot)


def _placed_gradients(rule: Callable, cotangents, *operands, params: Any) -> list:
    """``rule`` of reverse differentiation; over Explicit axes gradients are sharded as the operands are."""
    gradients = rule(cotangents, *operands, params=params)
    return [
        axes.placed(gradient, operand.aval.sharding.spec) if ad.is_undefined_primal(operand) else None
        for gradient, operand in zip(gradients, operands, strict=True)
    ]


def _check_float64(name: str, implementation: str, *avals) -> None:
    if any(aval.dtype == jnp.float64 for aval in avals):
        raise errors.UnsupportedError(
            f"{name}: the NPU computes no float64 ({implementation=}): cast to float32, or use implementation='xla'"
        )


def _rebind(primitive: Primitive, *operands, params, devices):
    return primitive.bind(*operands, params=params, devices=devices)


def _without_devices(rule: Callable) -> Callable:
    @functools.wraps(rule)
    def wrapped(*args, params, devices):
        return rule(*args, params=params)

    return wrapped


@functools.cache
def _asks_for_devices() -> ClosedJaxpr:
    """A program that holds a ``custom_partitioning`` equation: a parameter of primitives whose lowering makes one.

    JAX tells a lowering the devices it is for only if such an equation can be seen when the lowering starts.
    """
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(partition=None, sharding_rule="... -> ...")
    return jax.make_jaxpr(identity)(jnp.zeros(()))
