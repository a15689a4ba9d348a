"""The matrix products of a graph, and what keeps them from being products of the library."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var, primitives

from glass_jax.fusion.graph import Atom, Graph, Node, has_smaller_range, is_exact
from glass_jax.primitives.products import FLOAT8

FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A matrix product.

    Attributes:
      node: its equation.
      lhs: ``[*batch, ..., K]``.
      rhs: ``[*batch, K, N]``, or ``[*batch, N, K]`` with ``transpose_rhs``.
      transpose_rhs: the last two dimensions of ``rhs`` are exchanged.
      problem: why ``gemm`` cannot compute it, or None if it can. Then the above holds.
    """

    node: Node
    lhs: Atom
    rhs: Atom
    transpose_rhs: bool
    problem: str | None

    @property
    def out(self) -> Var:
        """The result."""
        return self.node.eqn.outvars[0]

    @property
    def operands(self) -> str:
        """Types and shapes of what is multiplied."""
        return " x ".join(f"{v.aval.dtype}{list(v.aval.shape)}" for v in self.node.eqn.invars)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of :data:`FLOATS` that is multiplied."""
        types = (self.lhs.aval.dtype, self.rhs.aval.dtype)
        return next(wide for wide in reversed(FLOATS) if all(is_exact(each, wide) for each in types))


def products(graph: Graph) -> list[Product]:
    """All products of ``graph`` whose results have dimensions, in its order."""
    dots = [node for node in graph.nodes if node.eqn.primitive is primitives.dot_general_p]
    return [_product(graph, node) for node in dots if node.eqn.outvars[0].aval.ndim]


def _product(graph: Graph, node: Node) -> Product:
    lhs, rhs = node.eqn.invars
    (_, contract_rhs), (batch, _) = node.eqn.params["dimension_numbers"]
    problem = _problem(node)
    transpose_rhs = tuple(contract_rhs) == (rhs.aval.ndim - 1,)
    swapped = (*range(len(batch)), len(batch) + 1, len(batch))
    while problem is None and (turn := graph.node(rhs)) is not None and turn.eqn.params.get("permutation") == swapped:
        rhs, transpose_rhs = turn.eqn.invars[0], not transpose_rhs
    return Product(node, lhs, rhs, transpose_rhs, problem)


def _problem(node: Node) -> str | None:
    lhs, rhs = (v.aval for v in node.eqn.invars)
    params = node.eqn.params
    (contract_lhs, contract_rhs), (batch_lhs, batch_rhs) = params["dimension_numbers"]
    batch = len(batch_lhs)
    rows_and_batch = not batch or lhs.ndim == batch + 2
    in_front = tuple(batch_lhs) == tuple(batch_rhs) == tuple(range(batch))
    over_last = tuple(contract_lhs) == (lhs.ndim - 1,) and len(contract_rhs) == 1
    if not (over_last and in_front and rows_and_batch and rhs.ndim == batch + 2):
        return f"over dimensions {tuple(contract_lhs)} and {tuple(contract_rhs)} it is no [..., K] times [K, N]"
    if not _is_default(params["precision"]):
        return f"its precision is {params['precision']}, not the default"
    if params["out_sharding"] is not None:
        return "it says how its result is sharded"
    types = {lhs.dtype, rhs.dtype}
    if not (types <= set(FLOATS) or types <= set(FLOAT8)):
        return f"{' times '.join(sorted(map(str, types)))} stays as it is"
    out = node.eqn.outvars[0].aval.dtype
    if jnp.issubdtype(out, jnp.floating) and any(has_smaller_range(out, each) for each in types):
        return f"its result is {out}, whose range is smaller than that of {' times '.join(sorted(map(str, types)))}"
    return None


def _is_default(precision: object) -> bool:
    default = (None, lax.Precision.DEFAULT)
    return precision in default or (isinstance(precision, tuple) and all(p in default for p in precision))
