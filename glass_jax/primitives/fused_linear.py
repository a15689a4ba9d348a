"""``ln_gelu_linear`` and ``linear_ln_gelu``: a linear layer fused with the LayerNorm and GELU before or after it.

Both primitives take operands whose first ``params.batch`` dimensions are batch dimensions, equal or 1 (an operand with
a 1 serves all positions and is never copied); they come from ``vmap``. The dimensions of ``x`` that follow are rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax.lowering import partition
from glass_jax.lowering.tiled import fused_linear as tiled
from glass_jax.lowering.xla import fused_linear as formula
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks, operation
from glass_jax.primitives.gemm import gemm
from glass_jax.primitives.operation import Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(operation.Params):
    """Static parameters of both primitives; see :mod:`glass_jax.lowering.xla.fused_linear`."""

    eps: float
    approximate: bool
    batch: int = 0

    @property
    def statics(self) -> dict:
        """The parameters of the formulas."""
        return {"batch": self.batch, "eps": self.eps, "approximate": self.approximate}


def ln_gelu_linear(
    x: jax.typing.ArrayLike,
    gamma: jax.typing.ArrayLike,
    beta: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    approximate: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """``gelu(layer_norm(x)) @ w + b``, the activations never in global memory.

    Equivalent, up to summation order, to::

        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + eps) * gamma + beta
        a = jax.nn.gelu(y, approximate=approximate).astype(x.dtype)
        return (jnp.matmul(a, w, preferred_element_type=jnp.float32) + b).astype(x.dtype)

    The activations ``a`` are rounded to the type of the operands, which the matrix units multiply; nothing else is
    rounded before the end. Works under ``jit``, ``vmap``, ``grad`` (of any order), ``jvp``, ``jax.checkpoint``,
    ``shard_map`` and on meshes with Auto or Explicit axes: rows and N stay sharded as they are, K is made whole.

    Args:
      x: ``[..., K]``; float32, float16 or bfloat16 (float64 on ``"xla"``).
      gamma: ``[K]``, a float: the scale of the LayerNorm.
      beta: ``[K]``, a float: its shift.
      w: ``[K, N]``, a float. If its type is not that of ``x``, both are promoted.
      b: ``[N]``, a float, or None.
      eps: added to the variance.
      approximate: gelu in its tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), else with erf.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[..., N]``, of the promoted type of ``x`` and ``w``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes or dtypes that do not fit, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      OutOfOnChipMemoryError: on the NPU, K so large that 16 rows of activations do not fit on the chip.
      UnsupportedError: float64 on the NPU.
    """
    x, gamma, beta, w = map(jnp.asarray, (x, gamma, beta, w))
    bias = {} if b is None else {"b": jnp.asarray(b)}
    checks.dimensions(
        "ln_gelu_linear",
        x=(x, "... K"),
        gamma=(gamma, "K"),
        beta=(beta, "K"),
        w=(w, "K N"),
        **{name: (vector, "N") for name, vector in bias.items()},
    )
    checks.floats("ln_gelu_linear", x=x, gamma=gamma, beta=beta, w=w, **bias)
    x, w, gamma, beta, *bias = _promoted(x, w, gamma, beta, *bias.values())
    params = Params.chosen(implementation, eps=float(eps), approximate=bool(approximate))
    return LN_GELU_LINEAR.bind(x, gamma, beta, w, *bias, params=params)


def linear_ln_gelu(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike | None,
    gamma: jax.typing.ArrayLike,
    beta: jax.typing.ArrayLike,
    *,
    eps: float = 1e-5,
    approximate: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """``gelu(layer_norm(x @ w + b))``, the sums never in global memory, with one rounding at the end.

    Equivalent, up to summation order, to::

        y = jnp.matmul(x, w, preferred_element_type=jnp.float32) + b
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + eps) * gamma + beta
        return jax.nn.gelu(y, approximate=approximate).astype(x.dtype)

    Works under ``jit``, ``vmap``, ``grad`` (of any order), ``jvp``, ``jax.checkpoint``, ``shard_map`` and on meshes
    with Auto or Explicit axes: rows stay sharded as they are, K and N are made whole.

    Args:
      x: ``[..., K]``; float32, float16 or bfloat16 (float64 on ``"xla"``).
      w: ``[K, N]``, a float. If its type is not that of ``x``, both are promoted.
      b: ``[N]``, a float, or None.
      gamma: ``[N]``, a float: the scale of the LayerNorm.
      beta: ``[N]``, a float: its shift.
      eps: added to the variance.
      approximate: gelu in its tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), else with erf.
      implementation: ``"xla"``, ``"npu_model"``, ``"host"`` or ``"ascend"``; default: ``glass.configure``'s,
        else by platform.

    Returns:
      ``[..., N]``, of the promoted type of ``x`` and ``w``.

    Raises:
      HardwareConstraintError: (a ValueError) shapes or dtypes that do not fit, or, with
        ``glass.configure(alignment="strict")``, a dimension that the hardware cannot take as it is.
      UnsupportedError: float64 on the NPU.
    """
    x, w, gamma, beta = map(jnp.asarray, (x, w, gamma, beta))
    bias = {} if b is None else {"b": jnp.asarray(b)}
    checks.dimensions(
        "linear_ln_gelu",
        x=(x, "... K"),
        w=(w, "K N"),
        **{name: (vector, "N") for name, vector in bias.items()},
        gamma=(gamma, "N"),
        beta=(beta, "N"),
    )
    checks.floats("linear_ln_gelu", x=x, w=w, **bias, gamma=gamma, beta=beta)
    x, w, gamma, beta, *bias = _promoted(x, w, gamma, beta, *bias.values())
    params = Params.chosen(implementation, eps=float(eps), approximate=bool(approximate))
    return LINEAR_LN_GELU.bind(x, w, gamma, beta, *bias, params=params)


def _promoted(x: jax.Array, w: jax.Array, *vectors: jax.Array) -> list[jax.Array]:
    """``x`` and ``w`` of one type, the vectors of the type of its sums."""
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return [x.astype(dtype), w.astype(dtype), *(vector.astype(accumulator(dtype)) for vector in vectors)]


# --- shapes and dimensions -----------------------------------------------------------------------------------------


def _lead(operands, batch: int) -> tuple[int, ...]:
    """The batch dimensions of the result."""
    return jnp.broadcast_shapes(*(operand.shape[:batch] for operand in operands))


def _abstract_eval(name: str, tails: tuple[str, ...], *avals, params: Params) -> jax.ShapeDtypeStruct:
    x, w = avals[0], avals[tails.index("k n")]
    if params.alignment == "strict":
        tiled.check_alignment(name, x, w)
    return jax.ShapeDtypeStruct((*_lead(avals, params.batch), *x.shape[params.batch : -1], w.shape[-1]), x.dtype)


def _dimensions(tails: tuple[str, ...], shared: str, *avals, params: Params) -> partition.Dimensions:
    """``tails`` names the last dimensions of each operand; devices share out ``shared``, batch dimensions and rows."""
    lead = _lead(avals, params.batch)
    batch = partition.broadcast("b", "", lead, lead)
    rows = [f"r{d}" for d in range(avals[0].ndim - 1 - params.batch)]
    terms = [
        [*partition.broadcast("b", tag, a.shape, lead), t] for tag, a, t in zip("uvwxy", avals, tails, strict=False)
    ]
    terms[0][-1:] = [*rows, "k"]
    rule = ", ".join(map(" ".join, terms)) + f" -> {' '.join([*batch, *rows, 'n'])}"
    return partition.Dimensions(rule, " ".join([*batch, *rows, shared]))


# --- transformations -----------------------------------------------------------------------------------------------


def _batch(bind: Callable[..., jax.Array], operands, dims, *, params: Params):
    return bind(*axes.lead(operands, dims), params=dataclasses.replace(params, batch=params.batch + 1)), 0


def _product(x, w, *bias, params: Params) -> jax.Array:
    """:func:`formula.linear` by the primitive ``gemm``, whose derivatives are products by the same implementation."""
    row = x.ndim == params.batch + 1
    x = x[..., None, :] if row else x
    w, *bias = (lax.expand_dims(a, range(params.batch, x.ndim - 2)) for a in (w, *bias))
    out = gemm(x, w, preferred_element_type=accumulator(x.dtype), implementation=params.implementation)
    out = out + bias[0][..., None, :] if bias else out
    return out[..., 0, :] if row else out


def _before_derivative(x, gamma, beta, w, *bias, params: Params) -> jax.Array:
    gamma, beta = (formula.over_rows(v, x.ndim, params.batch) for v in (gamma, beta))
    activations = formula.layer_norm_gelu(x, gamma, beta, eps=params.eps, approximate=params.approximate)
    return _product(activations.astype(x.dtype), w, *bias, params=params).astype(x.dtype)


def _after_derivative(x, w, gamma, beta, *bias, params: Params) -> jax.Array:
    y = _product(x, w, *bias, params=params)
    gamma, beta = (formula.over_rows(v, x.ndim, params.batch) for v in (gamma, beta))
    return formula.layer_norm_gelu(y, gamma, beta, eps=params.eps, approximate=params.approximate).astype(x.dtype)


# --- implementations and registration ------------------------------------------------------------------------------


def _formula(function: Callable[..., jax.Array], *operands, params: Params) -> jax.Array:
    return function(*operands, **params.statics)


# The last dimensions of each operand, those of x after its rows.
_BEFORE, _AFTER = ("k", "k", "k", "k n", "n"), ("k", "k n", "n", "n", "n")

LN_GELU_LINEAR = Operation(
    "ln_gelu_linear",
    abstract_eval=partial(_abstract_eval, "ln_gelu_linear", _BEFORE),
    dimensions=partial(_dimensions, _BEFORE, "n"),
    formula=partial(_formula, formula.ln_gelu_linear),
    tiled=tiled.ln_gelu_linear,
    batch=lambda operands, dims, *, params: _batch(LN_GELU_LINEAR.bind, operands, dims, params=params),
    derivative=_before_derivative,
)

LINEAR_LN_GELU = Operation(
    "linear_ln_gelu",
    abstract_eval=partial(_abstract_eval, "linear_ln_gelu", _AFTER),
    dimensions=partial(_dimensions, _AFTER, ""),
    formula=partial(_formula, formula.linear_ln_gelu),
    tiled=tiled.linear_ln_gelu,
    batch=lambda operands, dims, *, params: _batch(LINEAR_LN_GELU.bind, operands, dims, params=params),
    derivative=_after_derivative,
)
