"""``moe_gate``: which experts each token goes to, and how much each of them counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.lowering import sizes
from glass_jax.lowering.xla.gemm import accumulator
from glass_jax.primitives import axes, checks

SCORES = ("softmax", "sigmoid", "sqrt_softplus")

_SMALLEST_SUM = 1e-20  # added to the sum that weights are divided by, as in the models' own code
_TAIL = -40.0  # below it softplus(x) is exp(x) to the last digit of float64


def moe_gate(
    logits: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    *,
    k: int,
    score: str = "sigmoid",
    num_groups: int = 1,
    topk_groups: int = 1,
    route_scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The ``k`` experts of each token, and their weights.

    Equivalent to, for one token::

        scores = score(logits)
        choice = scores + bias                                  # -inf in all but the best topk_groups groups
        indices = argsort(-choice)[:k]
        weights = scores[indices]                               # without the bias
        weights = route_scale * (weights / (sum(weights) + 1e-20) if renormalize else weights)

    An expert's group is its index divided by ``E / num_groups``. A group counts as much as its best expert with
    ``"softmax"`` (DeepSeek-V2, arXiv:2405.04434), as its two best together with ``"sigmoid"`` (DeepSeek-V3,
    arXiv:2412.19437). Among equal experts, and among equal groups, the one of the lower index comes first.

    The weights are differentiable in ``logits``. The choice is not: ``bias`` has no gradient.

    Args:
      logits: ``[..., E]``, one for each expert, any float type; all is computed in float32 (float64 for float64).
      bias: ``[E]`` or None: what corrects the load of the experts; it takes part in the choice only.
      k: experts for each token.
      score: ``"softmax"``, ``"sigmoid"`` or ``"sqrt_softplus"``.
      num_groups: groups of neighbouring experts; 1 with ``"sqrt_softplus"``.
      topk_groups: how many of the groups a token may choose experts of.
      route_scale: what the weights are multiplied by at the end.
      renormalize: divide the weights by their sum.

    Returns:
      ``(weights, indices)``, each ``[..., k]``: float32 (float64), largest choice first; int32.

    Raises:
      HardwareConstraintError: (a ValueError) types or shapes that do not fit, an unknown ``score``, groups that do not
        divide the experts, more experts than the chosen groups have.
    """
    logits = jnp.asarray(logits)
    bias = None if bias is None else jnp.asarray(bias)
    _check(logits, bias, k=k, score=score, num_groups=num_groups, topk_groups=topk_groups)
    # Over Explicit mesh axes every device needs all experts of its tokens.
    logits = axes.placed(logits, jax.P(*jax.typeof(logits).sharding.spec[:-1], None))
    bias = None if bias is None else axes.placed(bias, jax.P(None))
    dtype = accumulator(logits.dtype)
    scores = _score(logits.astype(dtype), score)
    choice = lax.stop_gradient(scores)
    if bias is not None:
        choice = choice + lax.stop_gradient(bias.astype(dtype))
    if num_groups > 1:
        choice = _limit_to_groups(choice, num_groups, topk_groups, best=1 if score == "softmax" else 2)
    _, indices = _largest(choice, k)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _SMALLEST_SUM)
    return weights * route_scale, indices


def _check(logits: jax.Array, bias: jax.Array | None, *, k: int, score: str, num_groups: int, topk_groups: int) -> None:
    """Raises HardwareConstraintError for arguments that do not fit each other."""

    def fail(reason: str):
        raise errors.HardwareConstraintError(f"moe_gate: {reason}")

    given = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
    specs = {"logits": "... E", "bias": "E"}
    extents = checks.dimensions("moe_gate", **{name: (array, specs[name]) for name, array in given.items()})
    checks.floats("moe_gate", **given)
    experts = extents["E"]
    if not sizes.known(experts):
        fail(f"the number of experts is {experts}, a symbol; export the function for a number")
    if score not in SCORES:
        fail(f"{score=} is not one of {', '.join(SCORES)}")
    if score == "sqrt_softplus" and num_groups != 1:
        fail(f'{num_groups=}: no score of a group is defined for score="sqrt_softplus"; use num_groups=1')
    if num_groups < 1 or experts % num_groups:
        fail(f"{num_groups=} does not divide the {experts} experts into groups of one size")
    if not 1 <= topk_groups <= num_groups:
        fail(f"{topk_groups=} of {num_groups=}: choose from 1 to {num_groups}")
    available = experts // num_groups * topk_groups
    if not 1 <= k <= available:
        fail(f"{k=}: choose from 1 to {available}, the experts in {topk_groups} of {num_groups} groups of {experts}")


def _score(logits: jax.Array, score: str) -> jax.Array:
    match score:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
    # softplus underflows long before its square root does, and there the derivative of the root would be infinite.
    root = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _TAIL)))
    return jnp.where(logits < _TAIL, jnp.exp(jnp.minimum(logits, _TAIL) / 2), root)


def _limit_to_groups(choice: jax.Array, num_groups: int, topk_groups: int, best: int) -> jax.Array:
    """``choice``, -inf outside the ``topk_groups`` groups whose ``best`` experts have the largest sum.

    DeepSeek-V2's own code puts 0 there: the same weights, as it has no bias and its scores are not negative; but -inf
    keeps a token from another group's experts also where scores underflow.
    """
    groups = choice.reshape(*choice.shape[:-1], num_groups, -1)
    totals = jnp.sum(_largest(groups, min(best, groups.shape[-1]))[0], axis=-1)
    _, kept = _largest(totals, topk_groups)
    keep = jnp.any(kept[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(keep[..., None], groups, -jnp.inf).reshape(choice.shape)


def _largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` largest elements of each row and their indices, as ``lax.top_k``; a NaN counts as infinity.

    One round for each: on a CPU faster than ``lax.top_k`` for the few that a gate needs, and where the rows are spread
    over devices it stays there, while XLA gathers the operand of ``lax.top_k``.
    """
    lanes = jnp.arange(x.shape[-1], dtype=jnp.int32)
    left = jnp.nan_to_num(x, nan=jnp.inf, neginf=jnp.finfo(x.dtype).min)  # -inf is what is taken
    values, indices = [], []
    for _ in range(count):
        values.append(jnp.max(left, axis=-1))
        first = jnp.min(jnp.where(left == values[-1][..., None], lanes, x.shape[-1]), axis=-1)
        left = jnp.where(lanes == first[..., None], -jnp.inf, left)
        indices.append(first)
    return jnp.stack(values, axis=-1), jnp.stack(indices, axis=-1)
