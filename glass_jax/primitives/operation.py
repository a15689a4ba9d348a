"""What every operation shares as a JAX primitive: its rules registered together, its implementation chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from glass_jax.lowering.tiled import common
from glass_jax.primitives import axes


class Params(Protocol):
    """Static parameters of an operation: a frozen dataclass with at least these."""

    implementation: str | None
    chip: str
    alignment: str


class Operation:
    """A JAX primitive with one result and all its rules.

    Every rule takes the static parameters as one keyword, ``params``.

    Args:
      name: the operation's public name; its primitive is ``glass_<name>``.
      abstract_eval: ``(*avals, params) -> aval``, after every check that shapes and dtypes allow.
      formula: ``(*operands, params, explicit) -> array``, the implementation ``"xla"``; ``explicit`` is the sharding of
        the result if mesh axes are Explicit, else None.
      tiled: ``(*operands, params, split) -> array``, the implementations that run the tile kernel: ``"npu_model"`` and
        ``"ascend"``, told apart by ``params.implementation``.
      batch: rule of ``vmap``.
      jvp: rule of forward differentiation, or None.
      transpose: rule of reverse differentiation of the linear part, or None.
    """

    def __init__(
        self,
        name: str,
        *,
        abstract_eval: Callable,
        formula: Callable,
        tiled: Callable,
        batch: Callable,
        jvp: Callable | None = None,
        transpose: Callable | None = None,
    ):
        self.name = name
        self._formula, self._tiled = formula, tiled
        self.primitive = p = Primitive(f"glass_{name}")
        p.def_impl(jax.jit(functools.partial(_rebind, p), static_argnames=("params", "devices")))
        p.def_abstract_eval(_without_devices(abstract_eval))
        batching.primitive_batchers[p] = _without_devices(batch)
        if jvp is not None:
            ad.primitive_jvps[p] = _without_devices(jvp)
        if transpose is not None:
            ad.primitive_transposes[p] = _without_devices(transpose)
        mlir.register_lowering(p, functools.partial(self._lower, default="xla"))
        mlir.register_lowering(p, functools.partial(self._lower, default="ascend"), platform="ascend")

    def bind(self, *operands: jax.Array, params: Params) -> jax.Array:
        """Applies the operation to operands that vary over the same manual mesh axes, made so where they do not."""
        devices = _asks_for_devices() if params.implementation == "npu_model" else None
        return self.primitive.bind(*axes.vary_alike(*operands), params=params, devices=devices)

    def _lower(self, ctx: mlir.LoweringRuleContext, *operands, params: Any, devices: object, default: str):
        implementation = params.implementation or default
        if implementation == "xla":
            explicit = any(axes.is_sharded(aval) for aval in ctx.avals_in)
            sharding = ctx.avals_out[0].sharding if explicit else None
            fn = functools.partial(self._formula, params=params, explicit=sharding)
        else:
            split = common.split_of(ctx)
            common.check_ascend(self.name, implementation, default, split)
            fn = functools.partial(
                self._tiled, params=dataclasses.replace(params, implementation=implementation), split=split
            )
        return mlir.lower_fun(fn, multiple_results=False)(ctx, *operands)


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
