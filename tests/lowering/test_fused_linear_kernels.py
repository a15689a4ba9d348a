"""The kernels of ln_gelu_linear and linear_ln_gelu: sound at every named shape, double-buffered, exportable."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fused_linear_reference as judge
import glass_jax as glass
import numpy_reference as ref
from benchmarks.shapes.fused_linear import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache, npu_model
from glass_jax.lowering.tilelang.kernels.linear_ln_gelu import LinearLnGeluKernel
from glass_jax.lowering.tilelang.kernels.ln_gelu_linear import LnGeluLinearKernel

# What is verified in every run; the other named shapes are a slow sweep.
QUICK = {
    *(("950DT", shape) for shape in ("promise", "promise_float32", "odd", "v3")),
    *(("950PR", shape) for shape in ("promise", "odd")),
}
KERNELS = {"ln_gelu_linear": LnGeluLinearKernel, "linear_ln_gelu": LinearLnGeluKernel}


def kernel(name, m, k, n, dtype="bfloat16", **options):
    columns = k if name == "ln_gelu_linear" else n
    fields = {"columns": columns, "dtype": dtype, "bias": True, "eps": 1e-5, "approximate": True} | options
    return KERNELS[name](m=m, k=k, n=n, **fields)


@pytest.mark.parametrize(
    ("chip", "shape"),
    [
        pytest.param(chip, shape, marks=() if (chip, shape) in QUICK else pytest.mark.slow)
        for chip in ("950DT", "950PR")
        for shape in SHAPES
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_named_shapes_are_sound(name, chip, shape):
    assert glass.verify(getattr(glass, name), *getattr(SHAPES[shape], name), chip=chip) == []


@pytest.mark.parametrize("name", KERNELS)
def test_exports(name, tmp_path):
    glass.export(getattr(glass, name), *getattr(SHAPES["promise"], name), path=tmp_path / name)
    (source,) = (tmp_path / name / "kernels").glob("*.asc")
    assert "__mix__(1, 2)" in source.read_text()  # cube and vector units in one launch


def run(made, arrays):
    (out,) = jax.jit(functools.partial(npu_model.call, made, chip="950DT"))(*arrays)
    return out


def arrays(name, made):
    rng = np.random.default_rng(0)
    x, w = ref.random(rng, (made.m, made.k), made.dtype), ref.random(rng, (made.k, made.n), made.dtype)
    b, gamma, beta = (ref.random(rng, (1, size), "float32") for size in (made.n, made.columns, made.columns))
    bias = [b] if made.bias else []
    if name == "ln_gelu_linear":
        return [x, gamma, beta, w, *bias], judge.ln_gelu_linear(x, gamma, beta, w, *bias)
    return [x, w, *bias, gamma, beta], judge.linear_ln_gelu(x, w, bias[0] if bias else None, gamma, beta)


# Blocks that end in the middle, several items a core, columns in parts, rows in one unit only.
@pytest.mark.parametrize(
    ("sizes", "change"),
    [
        ((150, 128, 400), {"block_m": 32, "block_n": 128, "rows": 4, "chunks": 4, "splits": 2, "cores": 3}),
        ((37, 128, 64), {"block_m": 16, "rows": 8, "chunks": 1, "splits": 1, "cores": 1, "activations": 2}),
        ((3, 128, 192), {"block_m": 16, "block_n": 64, "rows": 1, "chunks": 2, "splits": 3, "cores": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_plan_of_ln_gelu_linear_computes_it(sizes, change, dtype, monkeypatch):
    made = kernel("ln_gelu_linear", *sizes, dtype)
    plan = dataclasses.replace(made.plan("950DT"), **change)
    monkeypatch.setattr(LnGeluLinearKernel, "plan", lambda self, chip: plan)
    operands, expected = arrays("ln_gelu_linear", made)
    ref.assert_close(run(made, operands), expected)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_that_stay_and_sums_that_are_computed_twice(resident, dtype, monkeypatch):
    made = kernel("linear_ln_gelu", 70, 48, 400, dtype)
    change = {"block_m": 32, "block_n": 128, "resident": resident, "cores": 2}
    plan = dataclasses.replace(made.plan("950DT"), **change)
    monkeypatch.setattr(LinearLnGeluKernel, "plan", lambda self, chip: plan)
    operands, expected = arrays("linear_ln_gelu", made)
    ref.assert_close(run(made, operands), expected)


def test_large_shapes_are_double_buffered():
    before = cache.compile(kernel("ln_gelu_linear", 8192, 1024, 4096), "950DT")
    versions = {a.buffer: a.versions for a in before.memory}
    buffers = ("act", "weights", "c", "inputs", "sums", "result", "row")
    assert min(versions[buffer] for buffer in buffers) == 2
    after = cache.compile(kernel("linear_ln_gelu", 4096, 3072, 768), "950DT")
    versions = {a.buffer: a.versions for a in after.memory}
    buffers = ("lhs", "rhs", "c", "sums", "bias", "scale", "shift", "result")
    assert min(versions[buffer] for buffer in buffers) == 2
    for made in (before, after):
        for space in (Space.L1, Space.L0C, Space.UB):
            assert memory.used(made.memory, space) <= chips.get("950DT").capacity(space)


@pytest.mark.parametrize("m", [1, 33, 8192])
@pytest.mark.parametrize("k", [64, 7936])
@pytest.mark.parametrize("n", [8, 1040, 18432])
def test_plans_cover_the_shape(m, k, n):
    for dtype in ("float32", "bfloat16"):
        plan = kernel("ln_gelu_linear", m, k, n, dtype).plan("950PR")
        assert plan.rows * plan.chunks * 2 >= min(m, plan.block_m)
        assert plan.cores <= 28 and plan.stages >= 2
        columns = -(-n // plan.block_n)
        assert plan.splits <= columns
        plan = kernel("linear_ln_gelu", m, k, n, dtype).plan("950PR")
        assert plan.cores <= 28 and plan.stages >= 2


def test_what_stays_on_chip():
    """float32, where the cube is slow, never multiplies twice up to 7168 columns; bfloat16 keeps what a block can."""
    assert kernel("linear_ln_gelu", 2048, 1024, 7168, "float32").plan("950DT").resident
    assert not kernel("linear_ln_gelu", 2048, 1024, 10944, "float32").plan("950DT").resident
    assert kernel("linear_ln_gelu", 4096, 3072, 768).plan("950DT").resident
    assert not kernel("linear_ln_gelu", 2048, 1024, 4096).plan("950DT").resident


def test_only_chips_with_a_generator_have_plans():
    with pytest.raises(errors.UnsupportedError, match="no code is generated for 910B1"):
        kernel("ln_gelu_linear", 16, 64, 64).plan("910B1")


@pytest.mark.parametrize("name", KERNELS)
def test_fingerprint_follows_what_the_code_depends_on(name):
    made = kernel(name, 128, 256, 512)
    assert made.fingerprint("950DT") == kernel(name, 128, 256, 512).fingerprint("950DT")
    changes = {"m": 256, "columns": 250, "eps": 1e-6, "approximate": False, "bias": False}
    others = [dataclasses.replace(made, **{field: value}) for field, value in changes.items()]
    assert len({made.fingerprint("950DT"), *(other.fingerprint("950DT") for other in others)}) == 6
    assert "tiles" in made.describe("950DT")


def test_gelu_of_large_arguments():
    """Neither form overflows or loses the sign far from zero."""
    args = jnp.asarray([[-60.0, -12.0, -6.0, -1e-20, 0.0, 1e-20, 6.0, 60.0]], "float32")
    for approximate in (True, False):
        made = kernel("ln_gelu_linear", 1, 64, 8, "float32", columns=64, bias=False, approximate=approximate)
        beta = jnp.tile(args, (1, 8))
        zeros = jnp.zeros((1, 64), "float32")
        out = run(made, [zeros, zeros, beta, jnp.eye(64, 8, dtype="float32")])
        np.testing.assert_allclose(out, judge.gelu(ref.f64(args), approximate), rtol=2e-6, atol=1e-9)
