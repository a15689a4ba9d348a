"""Operations and their gradients on an Explicit mesh, whatever layout operands have, against whole arrays."""

import functools

import jax
import layouts
import numpy as np
import pytest
from jax.sharding import AxisType

import glass_jax as glass


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def on_one_device(name):
    return jax.jit(layouts.results_and_gradients(name))(*layouts.arrays(name))


def check(name, specs) -> str | None:
    """What is wrong with the operation in this layout."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, spec) for x, spec in zip(layouts.arrays(name), specs, strict=True)]
        try:
            given = jax.jit(layouts.results_and_gradients(name))(*placed)
        except glass.errors.HardwareConstraintError as error:
            told = name.startswith("gemm") and "make rhs whole over" in str(error)
            return None if told else f"{specs}: {error}"
        except Exception as error:  # any: the sweep goes on and lists them
            return f"{specs}: {type(error).__name__}: {error}"
    for actual, expected in zip(jax.tree.leaves(given), jax.tree.leaves(on_one_device(name)), strict=True):
        actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
        if not np.allclose(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True):
            return f"{specs}: differs by {np.nanmax(np.abs(actual - expected))}"
    return None


@pytest.mark.parametrize("name", layouts.OPERATIONS)
def test_a_layout_that_operands_do_not_agree_on(name):
    assert not check(name, layouts.scattered(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts.OPERATIONS)
@pytest.mark.parametrize("axes", [layouts.of_one_axis, layouts.of_two_axes], ids=["one_axis", "two_axes"])
def test_every_layout(axes, name):
    wrong = [found for specs in sorted(axes(name), key=str) if (found := check(name, specs))]
    assert not wrong, "\n".join(wrong)
