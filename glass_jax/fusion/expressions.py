"""Expressions as polynomials over atoms, a form in which what is written differently but means the same looks the same.

``(x - m) * (r * gamma) + beta``, ``gamma * r * (x - m) + beta`` and ``x * (r * gamma) + (beta - m * r * gamma)`` become
one polynomial, and so do the mean of ``(x - m) ** 2`` and the mean of ``x ** 2`` minus ``m ** 2``, where ``m`` is the
mean of ``x``. An atom is a tuple: a kind and what it is of.

    ("seed",)              the array that everything is expressed in
    ("leaf", key)          an array that does not depend on the seed
    ("mean", n)            the mean of the seed's n-th powers over the last dimension
    ("sum", P)             a polynomial of several terms, under an exponent that is not a natural number
    ("logistic", P), ("erf", P), ("exp", P), ("relu", P), ("positive", P)     a function of a polynomial

Exponents are real: ``1 / sqrt(P)`` is the atom ("sum", P) to the power of -0.5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping

Atom = tuple[Hashable, ...]
Monomial = frozenset[tuple[Atom, float]]

SEED: Atom = ("seed",)

# Constants are given in 32 or 64 bits: factors that ought to be 1 are off by no more than this.
EXACT = 1e-5

# The largest expressions that are looked for, and what leads to them, have three or four.
_MAX_TERMS = 6


class TooLargeError(Exception):
    """An expression with more terms than any that is looked for."""


@dataclasses.dataclass(frozen=True)
class Poly:
    """A sum of monomials, each an atom or several to some powers, times its coefficient."""

    terms: frozenset[tuple[Monomial, float]]

    @classmethod
    def of(cls, coefficients: Mapping[Monomial, float]) -> Poly:
        """The polynomial with these coefficients, zeros left out."""
        terms = frozenset((monomial, c) for monomial, c in coefficients.items() if c != 0)
        if len(terms) > _MAX_TERMS:
            raise TooLargeError
        return cls(terms)

    @property
    def constant(self) -> float | None:
        """The value of a polynomial without atoms, None if it has some."""
        if not self.terms:
            return 0.0
        ((monomial, coefficient), *rest) = self.terms
        return coefficient if not rest and not monomial else None

    def __add__(self, other: Poly) -> Poly:
        total = dict(self.terms)
        for monomial, coefficient in other.terms:
            total[monomial] = total.get(monomial, 0.0) + coefficient
        return Poly.of(total)

    def __neg__(self) -> Poly:
        return self.scaled(-1.0)

    def __sub__(self, other: Poly) -> Poly:
        return self + -other

    def __mul__(self, other: Poly) -> Poly:
        total: dict[Monomial, float] = {}
        for a, c in self.terms:
            for b, d in other.terms:
                product = _times(a, b)
                total[product] = total.get(product, 0.0) + c * d
        return Poly.of(total)

    def scaled(self, factor: float) -> Poly:
        """The polynomial times a constant."""
        return Poly.of({monomial: c * factor for monomial, c in self.terms})


def const(value: float) -> Poly:
    """A number."""
    return Poly.of({frozenset(): value})


def atom(*parts: Hashable) -> Poly:
    """An atom by itself."""
    return Poly(frozenset({(frozenset({(parts, 1.0)}), 1.0)}))


def _times(a: Monomial, b: Monomial) -> Monomial:
    exponents = dict(a)
    for factor, exponent in b:
        exponents[factor] = exponents.get(factor, 0.0) + exponent
    return frozenset((factor, exponent) for factor, exponent in exponents.items() if exponent)


# --- functions -----------------------------------------------------------------------------------------------------


def power(base: Poly, exponent: float) -> Poly:
    """``base ** exponent``, where the expression it is from has a value."""
    whole = float(exponent).is_integer()
    if len(base.terms) == 1:
        ((monomial, coefficient),) = base.terms
        # sqrt(x ** 2) is not x; of an odd power that has a root, the factor has one.
        if whole or (coefficient > 0 and all(e % 2 for _, e in monomial)):
            factors = frozenset((a, e * exponent) for a, e in monomial if exponent)
            return Poly.of({factors: coefficient**exponent})
    elif whole and exponent >= 0:
        if exponent > _MAX_TERMS:
            raise TooLargeError
        return math.prod([base] * int(exponent), start=const(1.0))
    if (rate := _exp_plus_one(base)) is not None and exponent == -1:
        return logistic(-rate)
    return Poly(frozenset({(frozenset({(("sum", base), float(exponent))}), 1.0)}))


def _exp_plus_one(p: Poly) -> Poly | None:
    """``Q`` if ``p`` is ``1 + exp(Q)``."""
    rest = p - const(1.0)
    if len(rest.terms) == 1:
        ((monomial, coefficient),) = rest.terms
        if coefficient == 1 and len(monomial) == 1:
            (((kind, *of), exponent),) = monomial
            if kind == "exp" and exponent == 1:
                return of[0]
    return None


def logistic(p: Poly) -> Poly:
    """``1 / (1 + exp(-p))``, one minus which is that of ``-p``."""
    return const(1.0) - atom("logistic", -p) if _is_negative(p) else atom("logistic", p)


def tanh(p: Poly) -> Poly:
    """``2 logistic(2 p) - 1``."""
    return logistic(p.scaled(2.0)).scaled(2.0) - const(1.0)


def erf(p: Poly) -> Poly:
    """The error function, which is odd."""
    return -atom("erf", -p) if _is_negative(p) else atom("erf", p)


def exp(p: Poly) -> Poly:
    """``e ** p``."""
    return atom("exp", p)


def relu(p: Poly) -> Poly:
    """``max(p, 0)``; a variance is not negative but by rounding."""
    return p if close(p, VARIANCE) else atom("relu", p)


def positive(p: Poly) -> Poly:
    """1 where ``p > 0``, else 0."""
    return atom("positive", p)


def mean(p: Poly) -> Poly | None:
    """The mean of ``p`` over the last dimension; None if it is none of means of powers of the seed."""
    total = const(0.0)
    for monomial, coefficient in p.terms:
        factors = dict(monomial)
        degree = factors.pop(SEED, 0.0)
        if degree < 0 or not degree.is_integer() or not all(_is_of_row(factor) for factor in factors):
            return None
        row = Poly(frozenset({(frozenset(factors.items()), coefficient)}))
        total = total + (row * atom("mean", int(degree)) if degree else row)
    return total


def _is_of_row(factor: Atom) -> bool:
    """Whether an atom has one value a row."""
    kind, *of = factor
    if kind in ("seed", "leaf"):
        return False
    return kind == "mean" or all(_is_of_row(inner) for monomial, _ in of[0].terms for inner, _ in monomial)


def _is_negative(p: Poly) -> bool:
    """Whether the term of least degree has a negative coefficient, so that ``-p`` and ``p`` give different answers."""
    _, coefficient = min(p.terms, key=lambda term: sum(exponent for _, exponent in term[0]), default=(None, 0.0))
    return coefficient < 0


# --- comparison and known forms ------------------------------------------------------------------------------------


def close(a: Poly, b: Poly, tolerance: float = EXACT) -> bool:
    """Whether two polynomials are the same but for rounding of their constants, relative to each."""
    same = lambda s, t: abs(s[1] - t[1]) <= tolerance * abs(t[1]) and _pair_up(s[0], t[0], _same_factor(tolerance))  # noqa: E731
    return _pair_up(a.terms, b.terms, same)


def _same_factor(tolerance: float) -> Callable:
    def same(a: tuple[Atom, float], b: tuple[Atom, float]) -> bool:
        (kind, *of), exponent = a
        (other_kind, *other_of), other_exponent = b
        if kind != other_kind or exponent != other_exponent:
            return False
        return close(of[0], other_of[0], tolerance) if of and isinstance(of[0], Poly) else of == other_of

    return same


def _pair_up(a: Iterable, b: Iterable, same: Callable) -> bool:
    """Whether each of ``a`` has a partner of its own in ``b`` that is the same, and none is left."""
    rest = list(b)
    for item in a:
        partner = next((i for i, other in enumerate(rest) if same(item, other)), None)
        if partner is None:
            return False
        del rest[partner]
    return not rest


X = atom(*SEED)
MEAN = atom("mean", 1)
VARIANCE = atom("mean", 2) - MEAN * MEAN
ACTIVATIONS = {
    "relu": relu(X),
    "silu": X * logistic(X),
    "gelu": X.scaled(0.5) * (const(1.0) + tanh((X + power(X, 3).scaled(0.044715)).scaled(math.sqrt(2 / math.pi)))),
    "gelu (erf)": X.scaled(0.5) * (const(1.0) + erf(X.scaled(math.sqrt(0.5)))),
}


def activation(p: Poly, tolerance: float = EXACT) -> str | None:
    """The name of the activation of the seed that ``p`` is, or None."""
    return next((name for name, form in ACTIVATIONS.items() if close(p, form, tolerance)), None)


def shift(p: Poly) -> Hashable | None:
    """The key of the leaf that ``p`` adds to the seed, or None if it is not such a sum."""
    return _leaf(p - X) if len(p.terms) == 2 else None


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """``(x - mean) / sqrt(variance + eps) * scale + shift``; keys of the leaves, None where there is none.

    ``eps`` is None if it is not a number.
    """

    scale: Hashable | None
    shift: Hashable | None
    eps: float | None


def layer_norm(p: Poly) -> LayerNorm | None:
    """The layer norm of the seed that ``p`` is, or None."""
    scaled = [monomial for monomial, _ in p.terms if (SEED, 1.0) in monomial]
    if len(scaled) != 1:
        return None
    roots = [(a, e) for a, e in scaled[0] if a[0] == "sum" and e == -0.5]
    scale = Poly(frozenset({(scaled[0] - {(SEED, 1.0), *roots}, 1.0)}))
    if len(roots) != 1 or (scale.constant is None and _leaf(scale) is None):
        return None
    centered = (X - MEAN) * scale * Poly(frozenset({(frozenset(roots), 1.0)}))
    expected = {monomial for monomial, _ in centered.terms}
    rest = Poly(frozenset(term for term in (p - centered).terms if term[0] not in expected or abs(term[1]) > EXACT))
    epsilon = _epsilon(roots[0][0][1])
    if epsilon is None or (rest.terms and _leaf(rest) is None):
        return None
    return LayerNorm(_leaf(scale), _leaf(rest), epsilon.constant)


def _epsilon(radicand: Poly) -> Poly | None:
    """What a variance with ``eps`` added exceeds the variance by, or None if it is none."""
    of_seed = [(monomial, c) for monomial, c in radicand.terms if any(a[0] == "mean" for a, _ in monomial)]
    epsilon = Poly(radicand.terms - set(of_seed))
    is_eps = _leaf(epsilon) is not None or (epsilon.constant is not None and epsilon.constant >= 0)
    return epsilon if is_eps and close(Poly(frozenset(of_seed)), VARIANCE) else None


def _leaf(p: Poly) -> Hashable | None:
    """The key of the leaf that ``p`` is, or None."""
    if len(p.terms) != 1:
        return None
    ((monomial, coefficient),) = p.terms
    if len(monomial) != 1 or abs(coefficient - 1) > EXACT:
        return None
    (((kind, *key), exponent),) = monomial
    return key[0] if kind == "leaf" and exponent == 1 else None
