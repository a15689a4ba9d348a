"""The mla_decode kernel: sound on the chips at the shapes of models, its tiles, what it does not take."""

import dataclasses
import functools

import pytest

import glass_jax as glass
from benchmarks.shapes import mla_decode as shapes
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.mla_decode import MlaDecodeKernel, block_rows

CHIP = "950DT"
KERNEL = MlaDecodeKernel(
    batch=8, rows=64, d=576, dv=512, pages=256, page=64, table_pages=32, dtype="bfloat16", scale=0.05, queries=1,
    heads=64,
)  # fmt: skip


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    shape = shapes.SHAPES[name]
    fn = functools.partial(glass.mla_decode, implementation="npu_model", **shape.options)
    assert glass.verify(fn, *shape.arguments(), chip=chip) == []


def test_everything_stays_on_the_chip_in_two_versions():
    made = cache.compile(KERNEL, CHIP)
    versions = {room.buffer: room.versions for room in made.memory}
    doubled = ("kv_l1", "q_l0", "k_l0", "v_l0", "s_l0c", "o_l0c", "s", "p", "product")
    assert all(versions[name] == 2 for name in doubled)
    for space in (Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB):
        assert memory.used(made.memory, space) <= chips.get(CHIP).capacity(space)
    assert {argument.name for argument in made.arguments if argument.output} == {"out", "largest", "lse"}
    assert KERNEL.describe(CHIP) == "8 blocks of 64 rows, steps of 128 tokens, double-buffered"


def test_float32_tokens_have_one_version():
    wide = dataclasses.replace(KERNEL, dtype="float32")
    assert "one version of kv_l1" in wide.describe(CHIP)


def test_rows_are_shared_out_evenly():
    assert [block_rows(rows) for rows in (1, 16, 20, 64, 65, 128, 130)] == [
        (1, 16), (1, 16), (1, 32), (1, 64), (2, 48), (2, 64), (3, 48)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change, match",
    [
        ({"dtype": "int8"}, "dtype='int8'; use one of"),
        ({"d": 72}, "d=72 must be a positive multiple of 16"),
        ({"dv": 0}, "dv=0 must be a positive multiple of 16"),
        ({"rows": 65}, "rows=65 must be a positive multiple of 48"),
        ({"page": 0}, "page=0 must be a positive multiple of 1"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(KERNEL, **change)


def test_tokens_that_do_not_fit():
    large = dataclasses.replace(KERNEL, d=4096)
    with pytest.raises(errors.OutOfOnChipMemoryError, match=r"mla_decode.* does not fit 950DT: l1 \d+ of 524288 bytes"):
        large.build(CHIP)


def test_fingerprint_follows_what_the_code_depends_on():
    others = [dataclasses.replace(KERNEL, **change) for change in ({}, {"page": 32}, {"queries": 2, "heads": 32})]
    assert [other.fingerprint(CHIP) == KERNEL.fingerprint(CHIP) for other in others] == [True, False, False]
