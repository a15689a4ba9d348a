"""``tilelang_call``: a user's own TileLang kernel as a JAX operation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from glass_jax import config, errors
from glass_jax.lowering import artifact, partition
from glass_jax.lowering.tiled import common
from glass_jax.primitives import axes


@dataclasses.dataclass(frozen=True)
class Params:
    """Static parameters of the primitive: the kernel, and how and for which chip it runs.

    Attributes:
      kernel: the kernel.
      arguments: its parameters, with the shapes of this call.
      updates: positions of the parameters that are operands and results.
      implementation: what was asked for, None for the platform's default.
      chip: name of the chip.
    """

    kernel: artifact.Kernel
    arguments: tuple[artifact.Argument, ...]
    updates: tuple[int, ...]
    implementation: str | None
    chip: str

    @property
    def inputs(self) -> list[int]:
        """Positions of the kernel's operands, in the order of its signature."""
        return [i for i, argument in enumerate(self.arguments) if not argument.output or i in self.updates]

    @property
    def results(self) -> list[artifact.Argument]:
        """The kernel's results, in the order of ``out_idx``."""
        return [self.arguments[position] for position in self.kernel.outputs]


def tilelang_call(
    prim_func: Any, *, out_shape: Any, out_idx: int | Sequence[int] | None = None, update_idx: Sequence[int] = ()
) -> Callable[..., Any]:
    """A TileLang Ascend kernel as a function of JAX arrays.

    ::

        @T.prim_func
        def add(a: T.Tensor((n,), "float32"), b: T.Tensor((n,), "float32"), c: T.Tensor((n,), "float32")): ...

        f = glass.tilelang_call(add, out_shape=jax.ShapeDtypeStruct((n,), jnp.float32))
        c = jax.jit(f)(a, b)

    The kernel runs on the NPU model, or, lowered for the platform ``ascend``, as the code that TileLang generates. It
    works under ``jit``, ``vmap`` (one launch after the other) and ``shard_map``. It has no derivative of its own: give
    it one with ``jax.custom_vjp``.

    Args:
      prim_func: a ``@T.prim_func``, or a ``@tilelang.jit`` function that takes no arguments; one that does gives a
        ``prim_func`` by ``.get_tir(*args)``. Scalar parameters are operands of shape ``()``. On Ascend its shapes must
        be static, and it must have no scalar parameters.
      out_shape: a ``jax.ShapeDtypeStruct`` for the result, or a pytree of them, in the order of ``out_idx``.
      out_idx: positions of the results among the kernel's parameters (negative ones count from the end); default: the
        last ones, as many as ``out_shape`` has.
      update_idx: which of the positions in ``out_idx`` are also operands: the kernel reads or adds to what it finds
        there. What other results hold before the kernel writes them is undefined. Not on Ascend.

    Returns:
      A function of the kernel's other parameters, in their order, with results structured like ``out_shape``.

    Raises:
      HardwareConstraintError: (a ValueError) ``out_shape`` or an array does not match the kernel's signature.
      MissingDependencyError: TileLang is not installed.
      UnsupportedError: implementation ``"xla"`` is asked for, which a kernel without a formula does not have.
    """
    from glass_jax.lowering.tilelang import user

    leaves, tree = jax.tree.flatten(out_shape)
    kernel = user.user_kernel(prim_func, out_idx=tuple(range(-len(leaves), 0)) if out_idx is None else out_idx)
    results = [kernel.arguments[position] for position in kernel.outputs]
    if len(results) != len(leaves):
        raise errors.HardwareConstraintError(
            f"kernel {kernel.name}: out_shape has {len(leaves)} arrays, out_idx={out_idx} names {len(results)}"
        )
    for argument, leaf in zip(results, leaves, strict=True):
        _check(kernel.name, "out_shape", argument, leaf)
    arguments = list(kernel.arguments)
    for position, leaf in zip(kernel.outputs, leaves, strict=True):
        arguments[position] = dataclasses.replace(arguments[position], shape=tuple(leaf.shape))
    updates = tuple(position % len(arguments) for position in update_idx)
    if not set(updates) <= set(kernel.outputs):
        raise errors.HardwareConstraintError(
            f"kernel {kernel.name}: update_idx={tuple(update_idx)} names parameters that are no results; results are "
            f"{kernel.outputs}"
        )

    def call(*operands: jax.typing.ArrayLike) -> Any:
        options = config.current()
        params = Params(kernel, tuple(arguments), updates, options.implementation, options.chip)
        inputs = [params.arguments[position] for position in params.inputs]
        if len(operands) != len(inputs):
            names = ", ".join(argument.name for argument in inputs)
            raise errors.HardwareConstraintError(
                f"kernel {kernel.name} takes {len(inputs)} arrays ({names}), got {len(operands)}"
            )
        arrays = [jnp.asarray(operand) for operand in operands]
        for argument, array in zip(inputs, arrays, strict=True):
            _check(kernel.name, "the array", argument, array)
        return jax.tree.unflatten(tree, call_p.bind(*axes.vary_alike(*arrays), params=params))

    call.__name__ = kernel.name
    return call


def _check(kernel: str, what: str, argument: artifact.Argument, given: Any) -> None:
    shape, dtype, wanted = tuple(given.shape), jnp.dtype(given.dtype), jnp.dtype(argument.dtype)
    fits = len(shape) == len(argument.shape) and all(
        want in (None, have) for have, want in zip(shape, argument.shape, strict=True)
    )
    if not fits or dtype != wanted:
        sizes = ", ".join("?" if size is None else str(size) for size in argument.shape)
        raise errors.HardwareConstraintError(
            f"kernel {kernel}: parameter {argument.name} is {wanted}[{sizes}], {what} is {dtype}{list(shape)}; "
            "build the kernel for these shapes, or convert the array"
        )


def _abstract_eval(*operands, params: Params):
    if any(axes.is_sharded(aval) for aval in operands):
        raise errors.UnsupportedError(
            f"kernel {params.kernel.name} is for whole arrays, and an operand is sharded over an Explicit mesh axis; "
            "call it inside jax.shard_map, where it sees one device's part"
        )
    types = [(result.shape, jnp.dtype(result.dtype)) for result in params.results]
    if not operands:
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in types]
    mesh = operands[0].sharding.mesh
    return [
        operands[0].update(
            shape=shape, dtype=dtype, weak_type=False, sharding=jax.NamedSharding(mesh, jax.P(*(None,) * len(shape)))
        )
        for shape, dtype in types
    ]


def _jvp(primals, tangents, *, params: Params):
    raise errors.UnsupportedError(
        f"kernel {params.kernel.name} has no derivative; wrap the call in jax.custom_vjp and give it one"
    )


def _batch(operands, dims, *, params: Params):
    """One launch after the other: a kernel has no batch dimension to add one to."""
    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def one(rows):
        rows = iter(rows)
        return call_p.bind(
            *(x if dim is None else next(rows) for x, dim in zip(operands, dims, strict=True)), params=params
        )

    return lax.map(one, mapped), [0] * len(params.results)


def _lowering(default: str) -> mlir.LoweringRule:
    def rule(ctx, *operands, params: Params):
        implementation = params.implementation or default
        if implementation == "xla":
            raise errors.UnsupportedError(
                f'kernel {params.kernel.name} has no formula for implementation="xla"; use "npu_model" or "host"'
            )
        partition.check_ascend(f"kernel {params.kernel.name}", implementation, default, partition.split_of(ctx))
        options = {} if implementation == "ascend" else {"inputs": params.inputs}
        if params.updates and implementation == "ascend":
            raise errors.UnsupportedError(
                f"kernel {params.kernel.name} updates operands (update_idx), which the custom call does not pass yet; "
                "implementation='npu_model' runs it"
            )
        run = functools.partial(common.run, params.kernel, implementation=implementation, chip=params.chip, **options)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)

    return rule


call_p = Primitive("glass_tilelang_call")
call_p.multiple_results = True
call_p.def_impl(jax.jit(lambda *operands, params: call_p.bind(*operands, params=params), static_argnames=("params",)))
call_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[call_p] = _jvp
batching.primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, _lowering("npu_model"))
mlir.register_lowering(call_p, _lowering("ascend"), platform="ascend")
