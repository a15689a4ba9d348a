"""The patterns that become fused operations, found in a graph around its matrix products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from glass_jax.fusion import expressions as ex
from glass_jax.fusion.graph import Atom, Graph, Node, is_exact
from glass_jax.fusion.products import FLOATS, Product, products
from glass_jax.fusion.tracking import Tracked, track
from glass_jax.primitives.fused_linear import linear_ln_gelu, ln_gelu_linear
from glass_jax.primitives.gemm import gemm

_APPROXIMATE = {"gelu": True, "gelu (erf)": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """Equations that one operation can replace, or could but for ``problem``.

    Attributes:
      pattern: name of the pattern.
      product: the matrix product in it.
      parts: what was found, in its order.
      root: the result.
      nodes: the equations.
      inputs: what the operation takes, by the names of ``build``'s arguments.
      build: the operation.
      problem: why it must not replace them, or None.
    """

    pattern: str
    product: Product
    parts: tuple[str, ...]
    root: Var
    nodes: frozenset[Node]
    inputs: Mapping[str, Atom]
    build: Callable[..., jax.Array]
    problem: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Linear:
    """A product, or the sum of it and a bias."""

    out: Var
    nodes: frozenset[Node]
    bias: Atom | None

    @property
    def parts(self) -> tuple[str, ...]:
        return ("product",) if self.bias is None else ("product", "bias")


@dataclasses.dataclass(frozen=True, eq=False)
class _Normalized:
    """The gelu of a layer norm of ``seed``."""

    seed: Var
    out: Var
    nodes: frozenset[Node]
    norm: ex.LayerNorm
    gelu: str

    @property
    def parts(self) -> tuple[str, ...]:
        return ("layer norm", self.gelu)


class Finder:
    """The candidates of each pattern for each product of a graph, the largest first.

    Attributes:
      products: every matrix product of the graph.
    """

    def __init__(self, graph: Graph):
        self.products = products(graph)
        self._graph = graph
        self._tracked: dict[Var, dict[Var, Tracked]] = {}

    def gemm_activation(self, product: Product) -> Iterator[Candidate]:
        """The product with bias and activation, with one of both, and alone."""
        found: list[tuple[_Linear, str | None, Var, frozenset[Node]]] = []
        for linear in self._linears(product):
            for out, tracked in self._ends(linear.out):
                activation = ex.activation(tracked.poly, _tolerance(tracked))
                if activation is not None or tracked.poly == ex.X:
                    found.append((linear, activation, out, linear.nodes | tracked.nodes))
        for linear, activation, out, nodes in sorted(found, key=lambda each: -len(each[-1])):
            problem = None
            if activation == "gelu (erf)":
                problem = "the gelu of gemm is the tanh form"
            elif linear.bias is None and activation is None:
                problem = "neither a bias nor an activation follows"
            yield Candidate(
                pattern="gemm_activation",
                product=product,
                parts=linear.parts if activation is None else (*linear.parts, activation),
                root=out,
                nodes=nodes,
                inputs=_given(lhs=product.lhs, rhs=product.rhs, bias=linear.bias),
                build=functools.partial(_gemm, product, activation, out.aval.dtype),
                problem=problem or product.problem or self._problem(nodes, out, (product.out, nodes, out)),
            )

    def ln_gelu_linear(self, product: Product) -> Iterator[Candidate]:
        """The product of what a layer norm and a gelu give, with bias and without."""
        for before in self._normalized.get(product.lhs, ()):
            for linear in reversed(self._linears(product)):
                for out in (v for v, tracked in reversed(self._ends(linear.out)) if tracked.poly == ex.X):
                    after = linear.nodes | self._track(linear.out)[out].nodes
                    nodes = before.nodes | after
                    scale, shift = before.norm.scale, before.norm.shift
                    parts = (before.seed, before.nodes, before.out), (product.out, after, out)
                    problem = _misfit(before, product, layer_norm=before.seed, result=out)
                    yield Candidate(
                        pattern="ln_gelu_linear",
                        product=product,
                        parts=before.parts + linear.parts,
                        root=out,
                        nodes=nodes,
                        inputs=_given(x=before.seed, gamma=scale, beta=shift, w=product.rhs, b=linear.bias),
                        build=functools.partial(_ln_gelu_linear, product, before),
                        problem=problem or self._problem(nodes, out, *parts),
                    )

    def linear_ln_gelu(self, product: Product) -> Iterator[Candidate]:
        """The product, with bias or without, that goes into a layer norm and a gelu."""
        for linear in reversed(self._linears(product)):
            for after in sorted(self._normalizations(linear.out), key=lambda each: -len(each.nodes)):
                nodes = linear.nodes | after.nodes
                scale, shift = after.norm.scale, after.norm.shift
                yield Candidate(
                    pattern="linear_ln_gelu",
                    product=product,
                    parts=linear.parts + after.parts,
                    root=after.out,
                    nodes=nodes,
                    inputs=_given(x=product.lhs, w=product.rhs, b=linear.bias, gamma=scale, beta=shift),
                    build=functools.partial(_linear_ln_gelu, product, after),
                    problem=_misfit(after, product, result=after.out)
                    or self._problem(nodes, after.out, (product.out, nodes, after.out)),
                )

    def _track(self, seed: Var) -> dict[Var, Tracked]:
        if seed not in self._tracked:
            self._tracked[seed] = track(self._graph, seed)
        return self._tracked[seed]

    def _ends(self, seed: Var) -> list[tuple[Var, Tracked]]:
        """What is computed from ``seed``, ``seed`` included, but without mere copies of something before."""
        return [(v, t) for v, t in self._track(seed).items() if v is seed or not self._graph.is_copy(v)]

    def _linears(self, product: Product) -> list[_Linear]:
        """The product, then its sums with a bias."""
        found = {None: _Linear(product.out, frozenset({product.node}), None)}
        for out, tracked in self._track(product.out).items():
            if (bias := ex.shift(tracked.poly)) is not None and bias not in found:
                found[bias] = _Linear(out, tracked.nodes | {product.node}, bias)
        return list(found.values())

    def _normalizations(self, seed: Var, *, copies: bool = False) -> Iterator[_Normalized]:
        """The gelus of layer norms of ``seed``, and copies of them."""
        for normed, of_seed in self._ends(seed):
            if (norm := ex.layer_norm(of_seed.poly)) is None:
                continue
            for out, of_norm in self._track(normed).items() if copies else self._ends(normed):
                if (name := ex.activation(of_norm.poly, _tolerance(of_norm))) in _APPROXIMATE:
                    yield _Normalized(seed, out, of_seed.nodes | of_norm.nodes, norm, name)

    @functools.cached_property
    def _normalized(self) -> dict[Atom, list[_Normalized]]:
        """All gelus of layer norms, by their results."""
        summed = [node.eqn.invars[0] for node in self._graph.nodes if node.name == "reduce_sum"]
        seeds = [self._graph.origin(v) for v in summed if v.aval.ndim]
        found: dict[Atom, list[_Normalized]] = {}
        for seed in dict.fromkeys(seed for seed in seeds if isinstance(seed, Var)):
            for each in self._normalizations(seed, copies=True):
                found.setdefault(each.out, []).append(each)
        return found

    def _problem(self, nodes: frozenset[Node], root: Var, *parts: tuple[Var, frozenset[Node], Atom]) -> str | None:
        """What keeps any operation from replacing ``nodes``.

        Args:
          nodes: the equations.
          root: their result.
          *parts: what is computed without casts on the way: the first array, the equations, and the last one.
        """
        types = {v.aval.dtype for node in nodes for v in node.eqn.outvars} - {*FLOATS, jnp.dtype(bool)}
        if types:
            return f"{' and '.join(sorted(map(str, types)))} stays as it is"
        casts = (self._graph.overflow(inside, end, seed.aval.dtype) for seed, inside, end in parts)
        return next(filter(None, casts), None) or self._graph.escape(nodes, root)


def _given(**inputs: Atom | None) -> dict[str, Atom]:
    return {name: v for name, v in inputs.items() if v is not None}


def _tolerance(tracked: Tracked) -> float:
    """How far constants may be off: what the narrowest type on the way rounds them by."""
    types = [v.aval.dtype for node in tracked.nodes for v in node.eqn.outvars]
    return max([ex.EXACT, *(float(jnp.finfo(t).eps) for t in types if jnp.issubdtype(t, jnp.floating))])


def _misfit(normalized: _Normalized, product: Product, **others: Var) -> str | None:
    """What keeps a layer norm, a gelu and a product from being one operation, which has one type for all of them."""
    if product.problem is not None:
        return product.problem
    if product.lhs.aval.dtype not in FLOATS:
        return f"{product.lhs.aval.dtype} stays as it is"
    if product.rhs.aval.ndim != 2:
        return f"the weights have shape {product.rhs.aval.shape}, not [K, N]"
    if normalized.norm.eps is None:
        return "eps of the layer norm is an array, not a number"
    for name, v in others.items():
        if not is_exact(v.aval.dtype, product.dtype):
            other = f"{name.replace('_', ' ')} of {v.aval.dtype}"
            return f"{other} and product of {product.dtype}: the fused operation has one type for both"
    return None


# --- operations ----------------------------------------------------------------------------------------------------


def _gemm(product: Product, activation: str | None, dtype: jnp.dtype, lhs, rhs, bias=None) -> jax.Array:
    return gemm(
        lhs if lhs.ndim > 1 else lhs[None],
        rhs,
        bias=_vector(bias, product.out.aval.shape[-1]),
        activation=activation,
        transpose_rhs=product.transpose_rhs,
        preferred_element_type=dtype,
    )


def _ln_gelu_linear(product: Product, before: _Normalized, x, w, gamma=None, beta=None, b=None) -> jax.Array:
    return ln_gelu_linear(
        x.astype(product.dtype),
        *_scale_and_shift(gamma, beta, x.shape[-1]),
        w.T if product.transpose_rhs else w,
        _vector(b, product.out.aval.shape[-1]),
        eps=before.norm.eps,
        approximate=_APPROXIMATE[before.gelu],
    )


def _linear_ln_gelu(product: Product, after: _Normalized, x, w, gamma=None, beta=None, b=None) -> jax.Array:
    n = product.out.aval.shape[-1]
    return linear_ln_gelu(
        x,
        w.T if product.transpose_rhs else w,
        _vector(b, n),
        *_scale_and_shift(gamma, beta, n),
        eps=after.norm.eps,
        approximate=_APPROXIMATE[after.gelu],
    )


def _scale_and_shift(gamma, beta, size: int) -> tuple[jax.Array, jax.Array]:
    gamma = jnp.ones(size) if gamma is None else _vector(gamma, size)
    return gamma, jnp.zeros(size) if beta is None else _vector(beta, size)


def _vector(x: jax.Array | None, size: int) -> jax.Array | None:
    return None if x is None else jnp.broadcast_to(jnp.reshape(x, (-1,)), (size,))


PATTERNS: Mapping[str, Callable[[Finder, Product], Iterator[Candidate]]] = {
    "ln_gelu_linear": Finder.ln_gelu_linear,
    "linear_ln_gelu": Finder.linear_ln_gelu,
    "gemm_activation": Finder.gemm_activation,
}
