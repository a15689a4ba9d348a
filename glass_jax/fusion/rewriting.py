"""A jaxpr with fused operations in the place of what they replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from glass_jax import errors
from glass_jax.fusion.graph import Atom, Call, Graph, Node, live
from glass_jax.fusion.patterns import PATTERNS, Candidate, Finder
from glass_jax.fusion.products import Product
from glass_jax.fusion.report import Site

# Primitives whose inner jaxprs are rewritten, with the parameters that hold them: nothing else about them depends on
# how the jaxpr computes its results. Of a function with a derivative of its own, the rules stay as they are.
_INNER = {
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "cond": ("branches",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}


@dataclasses.dataclass
class Rewriter:
    """Replaces patterns in jaxprs and in those inside them, and notes each site.

    Attributes:
      patterns: names of the patterns; of two that share equations, the one named first is fused.
      sites: what was found so far.
    """

    patterns: Sequence[str]
    sites: list[Site] = dataclasses.field(default_factory=list)

    def function(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """The jaxpr of a whole function rewritten; the same object if nothing in it changes."""
        jaxpr, consts = self._rewritten(closed.jaxpr, (), hoist=True)
        return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr, consts=[*closed.consts, *consts])

    def _inner(self, jaxpr: ClosedJaxpr | Jaxpr, within: tuple[str, ...]) -> ClosedJaxpr | Jaxpr:
        """The jaxpr of an equation rewritten; the same object if nothing in it changes."""
        if not isinstance(jaxpr, ClosedJaxpr):
            return self._rewritten(jaxpr, within, hoist=False)[0]
        inner, _ = self._rewritten(jaxpr.jaxpr, within, hoist=False)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)

    def _rewritten(self, jaxpr: Jaxpr, within: tuple[str, ...], *, hoist: bool) -> tuple[Jaxpr, list]:
        """``jaxpr`` rewritten, the same object if nothing in it changes, and the values of variables it closes over in
        addition: ``jit`` calls in which something changes are opened.
        """
        graph = Graph(jaxpr, hoist=hoist)
        edits: dict[Node, list[JaxprEqn]] = {}
        opened: set[Call] = set()
        for candidate, eqns in self._choose(graph, within):
            edits |= {node: [] for node in candidate.nodes} | {graph.definition[candidate.root]: eqns}
            opened.update(_hiding(graph, candidate))
        for node in graph.nodes:
            if node not in edits and (eqn := self._inside(node.eqn, within)) is not node.eqn:
                edits[node] = [eqn]
        if not edits:
            return jaxpr, []
        opened |= {call for node in edits for call in node.calls}
        # A call may take what is gone, if what it makes of it is not needed.
        gone = {v for node, eqns in edits.items() if not eqns for v in node.eqn.outvars}
        opened |= {call for call in graph.calls if not gone.isdisjoint(call.given)}
        eqns = live(list(_emit(graph.body, edits, opened)), graph.outvars)
        read = {v for atoms in (graph.outvars, *(eqn.invars for eqn in eqns)) for v in atoms if isinstance(v, Var)}
        hoisted = {v: value for v, value in graph.hoisted.items() if v in read}
        jaxpr = jaxpr.replace(constvars=[*jaxpr.constvars, *hoisted], eqns=eqns, outvars=graph.outvars)
        return jaxpr, list(hoisted.values())

    def _choose(self, graph: Graph, within: tuple[str, ...]) -> list[tuple[Candidate, list[JaxprEqn]]]:
        """The candidates to replace at this level, and by what."""
        finder = Finder(graph)
        taken: dict[Node, Product] = {}
        chosen = []
        sites: list[tuple[Product, Site]] = []
        for pattern in self.patterns:
            for product in finder.products:
                if product.node in taken:
                    continue
                site, best = _decide(PATTERNS[pattern](finder, product), taken, within)
                if site is not None:
                    sites.append((product, site))
                if best is not None:
                    chosen.append(best)
                    taken |= dict.fromkeys(best[0].nodes, product)
        self.sites += [site for _, site in sorted(sites, key=lambda each: each[0].node.index)]
        return chosen

    def _inside(self, eqn: JaxprEqn, within: tuple[str, ...]) -> JaxprEqn:
        """``eqn`` with the jaxprs in it rewritten; the same object if nothing in them changes."""
        path = (*within, eqn.primitive.name.replace("remat2", "checkpoint"))
        changed = {}
        for name in _INNER.get(eqn.primitive.name, ()):
            before = eqn.params[name]
            each = before if isinstance(before, tuple) else (before,)
            after = _in_body(eqn, lambda each=each: [self._inner(jaxpr, path) for jaxpr in each])
            if any(a is not b for a, b in zip(after, each, strict=True)):
                changed[name] = tuple(after) if isinstance(before, tuple) else after[0]
        return eqn.replace(params=eqn.params | changed) if changed else eqn


def _in_body(eqn: JaxprEqn, fn: Callable[[], Any]) -> Any:
    """``fn()``, called where a ``shard_map`` has the axes of its mesh, as its body is."""
    if eqn.primitive.name != "shard_map":
        return fn()
    results = []

    def body() -> tuple[()]:
        results.append(fn())
        return ()

    options = {"mesh": eqn.params["mesh"], "check_vma": eqn.params["check_vma"]}
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))  # its name until JAX 0.10.1
    jax.make_jaxpr(jax.shard_map(body, in_specs=(), out_specs=(), axis_names=axes, **options))()
    return results[0]


def _decide(candidates: Iterable[Candidate], taken: Mapping[Node, Product], within: tuple[str, ...]):
    """What to say of one product, and the first candidate that can be replaced, with what replaces it."""
    largest: tuple[Candidate, str] | None = None
    for candidate in candidates:
        problem, eqns = candidate.problem or _shared(candidate, taken), None
        if problem is None:
            try:
                eqns = _equations(candidate)
            except errors.GlassError as error:
                problem = str(error)
        if eqns is not None:
            more = largest is not None and largest[0].parts != candidate.parts
            reason = f"not with {' + '.join(largest[0].parts)}: {largest[1]}" if more else ""
            return _site(candidate, within, fused=True, reason=reason), (candidate, eqns)
        largest = largest or (candidate, problem)
    return (None if largest is None else _site(largest[0], within, fused=False, reason=largest[1])), None


def _site(candidate: Candidate, within: tuple[str, ...], *, fused: bool, reason: str) -> Site:
    node = candidate.product.node
    around = " > ".join((*within, *filter(None, [str(node.eqn.source_info.name_stack)])))
    parts = " + ".join(candidate.parts)
    return Site(candidate.pattern, node.where, around, candidate.product.operands, parts, fused, reason)


def _shared(candidate: Candidate, taken: Mapping[Node, Product]) -> str | None:
    shared = sorted((node for node in candidate.nodes if node in taken), key=lambda node: node.index)
    other = taken[shared[0]] if shared else None
    return None if other is None else f"a part of it is fused with the {other.node}"


def _equations(candidate: Candidate) -> list[JaxprEqn]:
    """The fused operation as equations that define the candidate's root."""
    aval = candidate.root.aval

    def operation(*arrays: jax.Array) -> jax.Array:
        out = candidate.build(**dict(zip(candidate.inputs, arrays, strict=True)))
        return jnp.reshape(out, aval.shape).astype(aval.dtype)

    traced = jax.make_jaxpr(operation)(*(v.aval for v in candidate.inputs.values())).jaxpr
    if (actual := traced.outvars[0].aval) != aval.update(weak_type=False):
        raise errors.UnsupportedError(f"the fused operation would give {actual} instead of {aval}")
    names: dict[Var, Atom] = dict(zip(traced.invars, candidate.inputs.values(), strict=True))
    names[traced.outvars[0]] = candidate.root
    product = candidate.product.node.eqn
    return [
        eqn.replace(
            invars=[v if isinstance(v, Literal) else names[v] for v in eqn.invars],
            outvars=[names.setdefault(v, Var(v.aval)) for v in eqn.outvars],
            source_info=product.source_info,
        )
        for eqn in traced.eqns
    ]


def _hiding(graph: Graph, candidate: Candidate) -> Iterator[Call]:
    """The calls inside which an input of ``candidate`` is hidden from its root."""
    around = graph.definition[candidate.root].calls
    for v in candidate.inputs.values():
        node = graph.node(v)
        for call in node.calls if node is not None else ():
            if call not in around:
                if v in call.outvars:
                    break
                yield call


def _emit(body: Iterable[Node | Call], edits: Mapping[Node, list[JaxprEqn]], opened: Collection[Call]):
    for item in body:
        if isinstance(item, Node):
            yield from edits.get(item, [item.eqn])
        elif item in opened:
            yield from _emit(item.body, edits, opened)
        else:
            yield _unopened(item)


def _unopened(call: Call) -> JaxprEqn:
    """The equation of a call, its results named as they are in the graph."""
    outvars: list[Var] = []
    for v in call.outvars:
        known = isinstance(v, Literal) or v in call.given or v in outvars
        outvars.append(Var(v.aval) if known else v)
    return call.eqn.replace(outvars=outvars)
