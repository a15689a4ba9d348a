"""``glass.fuse``: a function whose LayerNorm, GELU, linear and activation layers run as fused operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from glass_jax.fusion.patterns import PATTERNS
from glass_jax.fusion.report import FuseReport
from glass_jax.fusion.rewriting import Rewriter


def fuse(
    fn: Callable[..., Any],
    patterns: Sequence[str] = ("ln_gelu_linear", "linear_ln_gelu", "gemm_activation"),
    *,
    report: bool = False,
) -> Callable[..., Any]:
    """``fn`` with its layers in plain JAX or Flax replaced by the library's fused operations.

    ::

        step = jax.jit(glass.fuse(model))
        print(glass.fuse(model, report=True)(x))   # what is fused, what is not and why; runs nothing

    A call traces ``fn`` to a jaxpr, replaces what the patterns describe, in loops, branches, ``jax.checkpoint`` and
    ``shard_map`` too, and evaluates the rest as it was. The dataflow decides, not names: any spelling of a layer norm
    or a gelu will do. What is computed stays what it was but for rounding, which is never coarser, and derivatives are
    those of the same mathematics. docs/fusion.md says what is matched, and when it is left alone.

    Put ``jax.jit`` outside: ``fn`` is traced at every call, and ``jit`` calls that hold a fused layer are inlined.

    Args:
      fn: a function of pytrees of arrays. Bind other arguments with ``functools.partial``.
      patterns: what to look for; of two that share a layer, the first is fused.

        - ``"ln_gelu_linear"``: LayerNorm, GELU, product, bias if there is one: ``glass.ln_gelu_linear``.
        - ``"linear_ln_gelu"``: product, bias if there is one, LayerNorm, GELU: ``glass.linear_ln_gelu``.
        - ``"gemm_activation"``: product with a bias, an activation (relu, gelu in its tanh form, silu) or both:
          ``glass.gemm``.
      report: the function returned gives a :class:`FuseReport` instead of its result. Its arguments may then be
        ``jax.ShapeDtypeStruct``.

    Returns:
      A function with the arguments and results of ``fn``.

    Raises:
      ValueError: there is no such pattern, or ``patterns`` is a name by itself.
    """
    if isinstance(patterns, str):
        raise ValueError(f"glass.fuse: {patterns=} is one name: pass a sequence of them")
    patterns = tuple(patterns)
    if unknown := [name for name in patterns if name not in PATTERNS]:
        raise ValueError(f"glass.fuse: unknown pattern {unknown[0]!r}; the patterns are {', '.join(PATTERNS)}")

    @functools.wraps(fn, updated=())
    def fused(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        rewriter = Rewriter(patterns)
        rewritten = rewriter.function(jaxpr)
        if report:
            return FuseReport(tuple(rewriter.sites))
        results = jaxpr_as_fun(rewritten)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return fused
