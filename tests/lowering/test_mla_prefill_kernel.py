"""The mla_prefill kernels: sound on the chips at the shapes of models, their tiles, what they do not take."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import glass_jax as glass
from benchmarks.shapes import mla_prefill as shapes
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.mla_prefill import MlaPrefillKernel
from glass_jax.lowering.tilelang.kernels.mla_prefill_backward import MlaPrefillBackwardKernel

CHIP = "950DT"
SIZES = {"batch": 1, "heads": 16, "q_length": 4096, "k_length": 4096, "d": 192, "dv": 128, "dtype": "bfloat16"}
FORWARD = MlaPrefillKernel(**SIZES, scale=0.1, causal=True, segments=False)
BACKWARD = {
    of: MlaPrefillBackwardKernel(of, **SIZES, scale=0.1, causal=True, segments=False) for of in ("queries", "keys")
}


def value(shape):
    """Launches the kernel."""
    return lambda q, k, v, ids=None: glass.mla_prefill(q, k, v, causal=shape.causal, segment_ids=ids)


def value_and_gradients(shape):
    """Launches all three kernels."""

    def fn(q, k, v, ids=None):
        results, pullback = jax.vjp(lambda *qkv: value(shape)(*qkv, ids), q, k, v)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    return fn


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    shape = shapes.SHAPES[name]
    assert glass.verify(value(shape), *shape.arguments(), chip=chip) == []


@pytest.mark.parametrize("name", ["v2_lite", "v3_heads_of_a_device", "float32", "odd"])
def test_nor_its_gradient(name):
    shape = shapes.SHAPES[name]
    assert glass.verify(value_and_gradients(shape), *shape.arguments(), chip=CHIP) == []


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_nor_any_gradient(name, chip):
    shape = shapes.SHAPES[name]
    assert glass.verify(value_and_gradients(shape), *shape.arguments(), chip=chip) == []


def test_it_is_exported(tmp_path):
    shape = shapes.SHAPES["v2_lite"]
    with glass.configure(chip=CHIP):
        glass.export(value_and_gradients(shape), *shape.arguments(), path=tmp_path / "bundle")
    assert len(list((tmp_path / "bundle" / "kernels").glob("*.asc"))) == 3


@pytest.mark.parametrize(
    ("kernel", "l1", "l0c", "ub"),
    [
        (FORWARD, 278528, 262144, 214784),
        (BACKWARD["queries"], 335872, 180224, 82688),
        (BACKWARD["keys"], 434176, 212992, 101376),
    ],
    ids=["forward", "queries", "keys"],
)
def test_everything_stays_on_the_chip_in_two_versions(kernel, l1, l0c, ub):
    made = cache.compile(kernel, CHIP)
    assert set(kernel.versions(CHIP).values()) == {2} and "double-buffered" in kernel.describe(CHIP)
    versions = {room.buffer: room.versions for room in made.memory}
    assert {versions[name] for name in kernel.versions(CHIP)} == {2}
    used = [memory.used(made.memory, space) for space in (Space.L1, Space.L0C, Space.UB)]
    assert used == [l1, l0c, ub]
    assert all(used[i] <= chips.get(CHIP).capacity(space) for i, space in enumerate((Space.L1, Space.L0C, Space.UB)))


def test_float32_has_room_for_fewer_versions():
    wide = dataclasses.replace(FORWARD, dtype="float32")
    assert [name for name, count in wide.versions(CHIP).items() if count == 1] == ["p_l1"]
    versions = dataclasses.replace(BACKWARD["keys"], dtype="float32").versions(CHIP)
    assert versions["others_l1"] == 1 and versions["s_l0c"] == 2


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD["keys"]], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "int8"}, "dtype='int8'; use one of"),
        ({"d": 72}, "d=72 must be a positive multiple of 16"),
        ({"dv": 96}, "dv=96 must be a positive multiple of 64"),
        ({"k_length": 0}, "k_length=0 must be a positive multiple of 1"),
    ],
)
def test_what_the_kernels_do_not_take(kernel, change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel, **change)


def test_gradients_are_of_queries_or_of_keys():
    with pytest.raises(errors.HardwareConstraintError, match="of='values'; use one of"):
        dataclasses.replace(BACKWARD["keys"], of="values")


def test_heads_that_do_not_fit_say_so():
    with pytest.raises(errors.OutOfOnChipMemoryError, match="does not fit 950DT: l1 .* of 524288 bytes"):
        dataclasses.replace(FORWARD, d=1024, dv=512).versions(CHIP)


def test_fingerprint_follows_what_the_code_depends_on():
    same = dataclasses.replace(FORWARD)
    assert same == FORWARD and hash(same) == hash(FORWARD) and same.fingerprint(CHIP) == FORWARD.fingerprint(CHIP)
    others = [
        FORWARD,
        dataclasses.replace(FORWARD, scale=0.2),
        dataclasses.replace(FORWARD, causal=False),
        *BACKWARD.values(),
    ]
    assert len({other.fingerprint(CHIP) for other in others}) == 5
    assert len({other.name for other in others}) == 4  # the scale is no part of the name
