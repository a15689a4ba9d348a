"""A jaxpr as one flat graph: nested ``jit`` calls opened, definitions and uses of every variable at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, primitives

Atom = Var | Literal

# Equations whose result holds the elements of their operand, each once or several times, as they are.
_RESHAPING = ("broadcast_in_dim", "copy", "pvary", "reshape", "squeeze")

# What a uniform array becomes, so that ``1 / n``, ``n - ddof > 0`` and the like are numbers.
_FOLDED: Mapping[str, Callable] = {
    **dict.fromkeys((*_RESHAPING, "convert_element_type"), lambda x: x),
    "add": np.add,
    "div": np.divide,
    "gt": np.greater,
    "max": np.maximum,
    "mul": np.multiply,
    "neg": np.negative,
    "pow": np.power,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
}


@dataclasses.dataclass(eq=False)
class Call:
    """A ``jit`` call that was opened. Variables are those of the graph.

    Attributes:
      eqn: its equation.
      given: the variables that its body has from outside.
      body: what stands in it.
      outvars: its results.
    """

    eqn: JaxprEqn
    given: frozenset[Var]
    body: list[Node | Call] = dataclasses.field(default_factory=list)
    outvars: list[Atom] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Node:
    """An equation of the graph, the opened calls that it is in, outermost first, and its place in the order."""

    eqn: JaxprEqn
    calls: tuple[Call, ...]
    index: int

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def where(self) -> str:
        """File, line and function that it is from, empty if that is not known."""
        return source_info_util.summarize(self.eqn.source_info).strip()

    def __str__(self) -> str:
        return f"{self.name} at {self.where.rpartition('/')[2]}" if self.where else self.name


class Graph:
    """A jaxpr whose ``jit`` calls are opened, each with variables of its own.

    Attributes:
      body: the jaxpr's equations in order, opened calls among them.
      nodes: all equations that are not opened calls, in order.
      calls: all opened calls.
      outvars: the results.
      definition: the node that defines a variable; arguments have none.
      uses: the nodes that read a variable, and whose results are needed.
      constants: the value of variables that are the same number everywhere.
      hoisted: the arrays that opened calls had closed over, by the variables that stand for them.

    Args:
      jaxpr: the jaxpr.
      hoist: whether calls that closed over arrays are opened, too.
    """

    def __init__(self, jaxpr: Jaxpr, *, hoist: bool):
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.definition: dict[Var, Node] = {}
        self.uses: dict[Var, list[Node]] = {}
        self.constants: dict[Var, float] = {}
        self.hoisted: dict[Var, Any] = {}
        self._hoist = hoist
        renamed: dict[Var, Atom] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
        self.body = self._open(jaxpr, renamed, (), rename=False)
        self.outvars = [_look_up(renamed, v) for v in jaxpr.outvars]
        needed = {id(eqn) for eqn in live([node.eqn for node in self.nodes], self.outvars)}
        for node in (node for node in self.nodes if id(node.eqn) in needed):
            for v in {v for v in node.eqn.invars if isinstance(v, Var)}:
                self.uses.setdefault(v, []).append(node)

    def _open(self, jaxpr: Jaxpr, renamed: dict[Var, Atom], calls: tuple[Call, ...], *, rename: bool):
        body: list[Node | Call] = []
        for eqn in jaxpr.eqns:
            invars = [_look_up(renamed, v) for v in eqn.invars]
            if self._can_open(eqn):
                inner, consts = eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts
                constvars = [Var(v.aval) for v in inner.constvars]
                self.hoisted.update(zip(constvars, consts, strict=True))
                given = (*constvars, *invars)
                call = Call(eqn.replace(invars=invars), frozenset(v for v in given if isinstance(v, Var)))
                names = dict(zip((*inner.constvars, *inner.invars), given, strict=True))
                call.body = self._open(inner, names, (*calls, call), rename=True)
                call.outvars = [_look_up(names, v) for v in inner.outvars]
                renamed.update(zip(eqn.outvars, call.outvars, strict=True))
                self.calls.append(call)
                body.append(call)
                continue
            outvars = [Var(v.aval) for v in eqn.outvars] if rename else eqn.outvars
            renamed.update(zip(eqn.outvars, outvars, strict=True))
            node = Node(eqn.replace(invars=invars, outvars=outvars), calls, len(self.nodes))
            self._add(node)
            body.append(node)
        return body

    def _can_open(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is a ``jit`` call that says nothing but what is computed."""
        if eqn.primitive is not primitives.jit_p or (eqn.params["jaxpr"].consts and not self._hoist):
            return False
        shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        sharded = any(isinstance(s, jax.sharding.Sharding) for s in shardings)
        return not (sharded or any(eqn.params["donated_invars"]) or eqn.params["compiler_options_kvs"])

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self.definition |= dict.fromkeys(node.eqn.outvars, node)
        self._fold(node)

    def _fold(self, node: Node) -> None:
        if node.name not in _FOLDED or None in (values := [self.constant(v) for v in node.eqn.invars]):
            return
        (result,) = node.eqn.outvars
        dtype = result.aval.dtype
        # Arithmetic of integers wraps and divides otherwise.
        if node.name in _RESHAPING or jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.bool_:
            with np.errstate(all="ignore"):  # infinities and NaN are as good a constant as any
                value = np.asarray(_FOLDED[node.name](*values)).astype(dtype)
            self.constants[result] = float(value)

    def constant(self, atom: Atom) -> float | None:
        """The number that all elements of ``atom`` are, or None if they differ or it is not known."""
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val) else None
        return self.constants.get(atom)

    def node(self, atom: Atom) -> Node | None:
        """The node that defines ``atom``; None for arguments and numbers."""
        return None if isinstance(atom, Literal) else self.definition.get(atom)

    def is_copy(self, v: Var) -> bool:
        """Whether the elements of ``v`` are those of another array, each once or several times."""
        node = self.definition[v]
        if node.name == "convert_element_type":
            return is_exact(node.eqn.invars[0].aval.dtype, v.aval.dtype)
        return node.name in _RESHAPING

    def origin(self, atom: Atom) -> Atom:
        """What ``atom`` is a cast of, if the cast changes no value."""
        while (node := self.node(atom)) is not None and node.name == "convert_element_type" and self.is_copy(atom):
            atom = node.eqn.invars[0]
        return atom

    def vector(self, atom: Atom) -> Atom:
        """The smallest array that ``atom`` holds along its last dimension, the same in all others; else ``atom``."""
        while (node := self.node(atom)) is not None and self.is_copy(atom) and _runs_along_last(node):
            atom = node.eqn.invars[0]
        return atom

    def overflow(self, nodes: frozenset[Node], end: Atom, source: jnp.dtype) -> str | None:
        """Why a cast among ``nodes``, which compute ``end`` from numbers of type ``source``, has to stay, or None.

        What is an infinity after a cast to a type of smaller range is none without it. At the end it makes no
        difference who casts.
        """
        while (node := self.node(end)) is not None and node.name in _RESHAPING:
            end = node.eqn.invars[0]
        for node in sorted(nodes, key=lambda node: node.index):
            (out,) = node.eqn.outvars if node.name == "convert_element_type" else (None,)
            if out is not None and out is not end and has_smaller_range(out.aval.dtype, source):
                return f"its {node} is to {out.aval.dtype}, whose range is smaller than that of {source}"
        return None

    def escape(self, nodes: frozenset[Node], root: Var) -> str | None:
        """Why the values inside ``nodes``, which compute ``root``, are needed outside, or None if they are not."""
        for node in sorted(nodes, key=lambda node: node.index):
            for v in node.eqn.outvars:
                if v is root:
                    continue
                if v in self.outvars:
                    return f"its {node} is a result of the function"
                user = next((use for use in self.uses.get(v, ()) if use not in nodes), None)
                if user is not None:
                    return f"its {node} is used again, by {user}"
        return None


def _look_up(renamed: Mapping[Var, Atom], v: Atom) -> Atom:
    return v if isinstance(v, Literal) else renamed[v]


def is_exact(source: jnp.dtype, target: jnp.dtype) -> bool:
    """Whether every value of a floating type is one of another's, too."""
    if not (jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)):
        return False
    s, t = jnp.finfo(source), jnp.finfo(target)
    return s.nmant <= t.nmant and s.maxexp <= t.maxexp and s.minexp >= t.minexp


def has_smaller_range(one: jnp.dtype, other: jnp.dtype) -> bool:
    """Whether numbers of the floating type ``other`` may be too large for ``one``."""
    return jnp.finfo(one).maxexp < jnp.finfo(other).maxexp


def _runs_along_last(node: Node) -> bool:
    """Whether ``node``, which copies, leaves a vector along the last dimension, or one number everywhere."""
    source, shape = node.eqn.invars[0].aval, node.eqn.outvars[0].aval.shape
    if source.size == 1 or source.shape == shape:
        return True
    if not source.shape or not shape or source.shape[-1] != source.size or shape[-1] != source.size:
        return False
    return node.name != "broadcast_in_dim" or node.eqn.params["broadcast_dimensions"][-1] == len(shape) - 1


def live(eqns: Sequence[JaxprEqn], outvars: Iterable[Atom]) -> list[JaxprEqn]:
    """``eqns`` without those whose results nobody needs any more."""
    needed = {v for v in outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, Var))
            kept.append(eqn)
    return kept[::-1]
