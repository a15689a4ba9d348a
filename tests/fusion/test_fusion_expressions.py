"""The algebra of expressions: equal forms from different ways to compute, checked against numbers."""

import math

import numpy as np
import pytest

from glass_jax.fusion import expressions as ex
from glass_jax.fusion.expressions import Poly, X, atom, const, power

A, B = atom("leaf", "a"), atom("leaf", "b")


def evaluate(p: Poly, x: np.ndarray, leaves: dict) -> np.ndarray:
    """The value of an expression, in NumPy."""
    total = np.zeros_like(x)
    for monomial, coefficient in p.terms:
        factors = [_atom(parts, x, leaves) ** exponent for parts, exponent in monomial]
        total = total + coefficient * math.prod(factors, start=np.ones_like(x))
    return total


def _atom(parts: tuple, x: np.ndarray, leaves: dict) -> np.ndarray:
    kind, *of = parts
    match kind:
        case "seed":
            return x
        case "leaf":
            return leaves[of[0]]
        case "mean":
            return (x ** of[0]).mean(-1, keepdims=True)
    inner = evaluate(of[0], x, leaves)
    functions = {
        "sum": lambda y: y,
        "logistic": lambda y: 1 / (1 + np.exp(-y)),
        "erf": np.vectorize(math.erf),
        "exp": np.exp,
        "relu": lambda y: np.maximum(y, 0),
        "positive": lambda y: (y > 0).astype(float),
    }
    return functions[kind](inner)


EQUAL = [
    (X + A, A + X),
    ((X + A) * B, X * B + B * A),
    ((X - X), const(0.0)),
    (power(X, 3), X * X * X),
    (power(power(X + A, -0.5), 2), power(X + A, -1)),
    (power(power(X + A, 0.5), -1), power(X + A, -0.5)),
    (ex.tanh(-X), -ex.tanh(X)),
    (ex.erf(A - A - X), -ex.erf(X)),
    (ex.logistic(-X), const(1.0) - ex.logistic(X)),
    (power(const(1.0) + ex.exp(-X), -1), ex.logistic(X)),
    (ex.mean((X - ex.MEAN) * (X - ex.MEAN)), ex.VARIANCE),
    (ex.mean(X.scaled(2.0) + const(3.0)), ex.MEAN.scaled(2.0) + const(3.0)),
    (ex.relu(ex.VARIANCE), ex.VARIANCE),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=map(str, range(len(EQUAL))))
def test_equal_expressions_have_one_form(one, other):
    assert ex.close(one, other)


# Values are positive where a root is taken, as in a program that has a result.
EXPRESSIONS = [
    ((X + A) * (B - X), lambda x, a, b: (x + a) * (b - x)),
    (power(X * X + A, -0.5) * X, lambda x, a, b: x / np.sqrt(x * x + a)),
    (power(power(A, -1), 0.5) * B, lambda x, a, b: b / np.sqrt(a) + 0 * x),
    (ex.tanh(X + A), lambda x, a, b: np.tanh(x + a)),
    (ex.erf(-X) * B, lambda x, a, b: np.vectorize(math.erf)(-x) * b),
    (power(const(1.0) + ex.exp(X + A), -1), lambda x, a, b: 1 / (1 + np.exp(x + a))),
    (ex.mean(X * X * X + X), lambda x, a, b: (x**3 + x).mean(-1, keepdims=True) + 0 * x),
    (ex.positive(X) * A, lambda x, a, b: np.where(x > 0, a, 0)),
    (ex.ACTIVATIONS["gelu"], lambda x, a, b: x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))),
    (ex.ACTIVATIONS["gelu (erf)"], lambda x, a, b: x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))),
]


@pytest.mark.parametrize(("expression", "fn"), EXPRESSIONS, ids=map(str, range(len(EXPRESSIONS))))
def test_an_expression_is_what_it_is_made_of(expression, fn):
    rng = np.random.default_rng(0)
    x, a, b = rng.standard_normal((3, 7)), rng.uniform(0.1, 2, 7), rng.standard_normal(7)
    np.testing.assert_allclose(evaluate(expression, x, {"a": a, "b": b}), fn(x, a, b), rtol=1e-8)


def test_roots_of_squares_are_kept():
    assert power(X * X, 0.5) != X
    np.testing.assert_allclose(evaluate(power(X * X, 0.5), np.array([[-2.0, 3.0]]), {}), [[2.0, 3.0]])
    assert power(-X, 0.5) != power(X, 0.5)


def test_the_mean_of_what_varies_along_the_row_is_not_known():
    assert ex.mean(X * A) is None
    assert ex.mean(ex.exp(X)) is None
    assert ex.mean(power(X, -1)) is None
    row = power(ex.VARIANCE + const(1e-5), -0.5)
    assert ex.mean(X * row) == ex.MEAN * row


def test_powers():
    assert power(X, 100) == Poly(frozenset({(frozenset({(ex.SEED, 100.0)}), 1.0)}))
    assert power(X, 0) == power(X + A, 0) == const(1.0)


def test_large_expressions_are_given_up():
    with pytest.raises(ex.TooLargeError):
        power(X + A, 100)
    with pytest.raises(ex.TooLargeError):
        power(X + A + B, 5)


def test_close_is_relative_to_each_constant():
    assert ex.close(X.scaled(1e-3), X.scaled(1.001e-3), tolerance=2e-3)
    assert not ex.close(X.scaled(1e-3), X.scaled(1.001e-3))
    assert not ex.close(X, A)
    assert not ex.close(ex.logistic(X), ex.logistic(X + A))


@pytest.mark.parametrize("scale", [None, "a"])
@pytest.mark.parametrize("shift", [None, "b"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.1])
def test_layer_norm_is_taken_apart(scale, shift, eps):
    p = (X - ex.MEAN) * power(ex.VARIANCE + const(eps), -0.5)
    p = p * A if scale else p
    p = p + B if shift else p
    norm = ex.layer_norm(p)
    assert (norm.scale, norm.shift) == (scale, shift)
    assert norm.eps == pytest.approx(eps)


@pytest.mark.parametrize(
    "p",
    [
        X * power(ex.VARIANCE + const(1e-5), -0.5),
        (X - ex.MEAN) * power(ex.VARIANCE - const(1e-5), -0.5),
        (X - ex.MEAN) * power(atom("mean", 2) + const(1e-5), -0.5),
        (X - ex.MEAN) * power(ex.VARIANCE + const(1e-5), -1),
        (X - ex.MEAN).scaled(2.0) * power(ex.VARIANCE + const(1e-5), -0.5),
        (X - ex.MEAN) * power(ex.VARIANCE.scaled(1.01) + const(1e-5), -0.5),
        (X - ex.MEAN) * A * A * power(ex.VARIANCE + const(1e-5), -0.5),
        (X - ex.MEAN) * power(ex.VARIANCE + const(1e-5), -0.5) + A + B,
    ],
    ids=map(str, range(8)),
)
def test_what_is_not_quite_a_layer_norm(p):
    assert ex.layer_norm(p) is None
