"""What the equations of a graph compute from one array, as expressions of that array."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from glass_jax.fusion import expressions as ex
from glass_jax.fusion.expressions import Poly
from glass_jax.fusion.graph import Atom, Graph, Node, live


@dataclasses.dataclass(frozen=True)
class Tracked:
    """An array that is computed from the seed.

    Attributes:
      poly: its elements, as an expression of the seed's element at the same place, or of its row.
      nodes: the equations that compute it.
      summed: the last dimension is gone. An array of which it is left has it whole, or of size 1.
    """

    poly: Poly
    nodes: frozenset[Node]
    summed: bool = False


def track(graph: Graph, seed: Var) -> dict[Var, Tracked]:
    """Everything that is computed from ``seed`` as an expression of it, in the order of the graph.

    Dimensions but the last may be split and merged on the way, as long as elements stay in order.
    """
    found = {seed: Tracked(ex.X, frozenset())}
    queue = [(node.index, node) for node in graph.uses.get(seed, ())]
    heapq.heapify(queue)
    seen: set[int] = set()
    while queue:
        index, node = heapq.heappop(queue)
        if index in seen:
            continue
        seen.add(index)
        try:
            result = _step(graph, node, found, seed.aval.shape[-1])
        except (ex.TooLargeError, OverflowError):
            result = None
        if result is None:
            continue
        (out,) = node.eqn.outvars
        poly, summed = result
        inside = (found[v].nodes for v in node.eqn.invars if isinstance(v, Var) and v in found)
        found[out] = Tracked(poly, frozenset((node,)).union(*inside), summed)
        for use in graph.uses.get(out, ()):
            heapq.heappush(queue, (use.index, use))
    return found


def _step(graph: Graph, node: Node, found: Mapping[Var, Tracked], size: int) -> tuple[Poly, bool] | None:
    """The expression of a node's result and whether its last dimension is gone; None if that is not known."""
    eqn = node.eqn
    if len(eqn.outvars) != 1:
        return None
    first = None if isinstance(eqn.invars[0], Literal) else found.get(eqn.invars[0])
    if node.name in ("broadcast_in_dim", "reshape", "squeeze"):
        summed = _reshaped(eqn, first.summed, size) if first else None
        return None if summed is None else (first.poly, summed)
    if node.name == "reduce_sum":
        return _total(eqn, first, size)
    if (summed := _elementwise(eqn, found, size)) is None:
        return None
    operands = [_operand(graph, v, found, 1 if summed else size) for v in eqn.invars]
    return None if None in operands or (poly := _result(node, operands)) is None else (poly, summed)


def _operand(graph: Graph, v: Atom, found: Mapping[Var, Tracked], size: int) -> Poly | None:
    """An operand's expression: of the seed, a number or a vector of ``size`` along the last dimension; else None."""
    if isinstance(v, Var) and v in found:
        return found[v].poly
    if (value := graph.constant(v)) is not None:
        return ex.const(value)
    leaf = graph.vector(v)
    is_vector = leaf.aval.size == 1 or leaf.aval.shape[-1] == leaf.aval.size == size
    return ex.atom("leaf", leaf) if is_vector and leaf.aval.dtype != jnp.bool_ else None


# --- shapes --------------------------------------------------------------------------------------------------------


def _reshaped(eqn: JaxprEqn, summed: bool, size: int) -> bool | None:
    """Whether the last dimension is gone from what was reshaped or broadcast; None if elements leave their place."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        rows = before if summed else before[:-1]
        in_place = tuple(eqn.params["broadcast_dimensions"]) == tuple(range(len(before)))
        return False if in_place and after and after[:-1] == rows and after[-1] in (1, size) else None
    if eqn.invars[0].aval.size != eqn.outvars[0].aval.size or eqn.params.get("dimensions") not in (None, ()):
        return None
    if summed:
        return False if after == (*before, 1) else None
    if after and after[-1] == before[-1]:
        return False
    return True if after == before[:-1] else None


def _total(eqn: JaxprEqn, of: Tracked | None, size: int) -> tuple[Poly, bool] | None:
    """The sum over the last dimension."""
    shape = eqn.invars[0].aval.shape
    if of is None or of.summed or tuple(eqn.params["axes"]) != (len(shape) - 1,) or shape[-1] != size or size < 2:
        return None
    mean = ex.mean(of.poly)
    return None if mean is None else (mean.scaled(size), True)


def _elementwise(eqn: JaxprEqn, found: Mapping[Var, Tracked], size: int) -> bool | None:
    """Whether the last dimension is gone from operands of one place; None if operands are of different places."""
    operands = [(v, found[v]) for v in eqn.invars if isinstance(v, Var) and v in found]
    shape = eqn.outvars[0].aval.shape
    if all(tracked.summed for _, tracked in operands):
        alike = all(v.aval.shape == shape for v, _ in operands)
        return True if alike and all(v.aval.shape in ((), shape) for v in eqn.invars) else None
    for v, tracked in operands:
        if tracked.summed:  # one number for a single row
            in_place = v.aval.shape == () and len(shape) == 1
        else:
            in_place = v.aval.shape[:-1] == shape[:-1] and v.aval.shape[-1] in (1, shape[-1])
        if not in_place:
            return None
    return False if shape[-1] in (1, size) else None


# --- values --------------------------------------------------------------------------------------------------------


def _quotient(x: Poly, y: Poly) -> Poly | None:
    if y.constant is None:
        return x * ex.power(y, -1)
    return x.scaled(1 / y.constant) if y.constant else None


_FUNCTIONS: Mapping[str, Callable[..., Poly | None]] = {
    "add": Poly.__add__,
    "add_any": Poly.__add__,
    "copy": lambda x: x,
    "div": _quotient,
    "erf": ex.erf,
    "erfc": lambda x: ex.const(1.0) - ex.erf(x),
    "exp": ex.exp,
    "logistic": ex.logistic,
    "mul": Poly.__mul__,
    "neg": Poly.__neg__,
    "pvary": lambda x: x,
    "rsqrt": lambda x: ex.power(x, -0.5),
    "sqrt": lambda x: ex.power(x, 0.5),
    "square": lambda x: ex.power(x, 2),
    "sub": Poly.__sub__,
    "tanh": ex.tanh,
}


def _result(node: Node, operands: list[Poly]) -> Poly | None:
    """The expression of an elementwise equation's result."""
    eqn = node.eqn
    if node.name in _FUNCTIONS:
        return _FUNCTIONS[node.name](*operands)
    match node.name:
        case "convert_element_type":
            is_float = jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
            return operands[0] if is_float and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating) else None
        case "integer_pow":
            return ex.power(operands[0], eqn.params["y"])
        case "pow":
            exponent = operands[1].constant
            return None if exponent is None else ex.power(operands[0], exponent)
        case "max" if 0.0 in (zero := [p.constant for p in operands]):
            return ex.relu(operands[1 - zero.index(0.0)])
        case "gt" if operands[1].constant == 0:
            return ex.positive(operands[0])
        case "select_n":
            return _selected(*operands)
        case "custom_jvp_call" if _is_relu(eqn):
            return ex.relu(operands[0])
    return None


def _selected(which: Poly, *cases: Poly) -> Poly | None:
    if which.constant is not None:
        return cases[int(which.constant)]
    return which * cases[1] if cases[0].constant == 0 else None


def _is_relu(eqn: JaxprEqn) -> bool:
    """Whether a function with a derivative of its own is relu, and that derivative relu's: 0 at 0."""
    if len(eqn.invars) != 1 or _expression(eqn.params["call_jaxpr"].jaxpr) != ex.relu(ex.X):
        return False
    aval = eqn.invars[0].aval
    whole = jax.make_jaxpr(lambda x: x)(aval)
    call = jaxpr_as_fun(whole.replace(jaxpr=whole.jaxpr.replace(invars=eqn.invars, outvars=eqn.outvars, eqns=[eqn])))
    derivative = jax.make_jaxpr(lambda x: jax.jvp(call, (x,), (lax.full_like(x, 1),))[1])(aval)
    return _expression(derivative.jaxpr) == ex.positive(ex.X)


def _expression(jaxpr: Jaxpr) -> Poly | None:
    """The result of ``jaxpr`` as an expression of its argument, or None if that is not known."""
    graph = Graph(jaxpr.replace(eqns=live(jaxpr.eqns, jaxpr.outvars)), hoist=False)
    tracked = track(graph, jaxpr.invars[0]).get(graph.outvars[0])
    return None if tracked is None else tracked.poly
