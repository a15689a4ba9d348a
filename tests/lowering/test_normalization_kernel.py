"""The kernel of rms_norm and layer_norm: what it says of itself, and that the chip has room for what it plans."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import normalization as shapes
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.normalization import NormalizationKernel

CHIP = "950DT"


def kernel(rows, columns, dtype="float32", *, centered=False) -> NormalizationKernel:
    return NormalizationKernel(centered=centered, rows=rows, columns=columns, dtype=dtype, eps=1e-6)


@pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("width", "dtype", "buffers"),
    [
        ("v3_hidden", "bfloat16", 3),
        ("v3_hidden", "float32", 3),
        ("v2_lite_kv_latent", "float32", 3),
        ("v3_inner", "bfloat16", {False: 3, True: 2}),
        # Of 253952 bytes a row takes 73728, and so do gamma and beta.
        ("v3_inner", "float32", {False: 2, True: 1}),
    ],
)
def test_tiles_are_loaded_and_stored_while_others_are_computed(width, dtype, buffers, centered):
    made = cache.compile(kernel(4096, shapes.WIDTHS[width], dtype, centered=centered), CHIP)
    (tile,) = [allocation for allocation in made.memory if allocation.buffer == "tile"]
    assert tile.versions == (buffers if isinstance(buffers, int) else buffers[centered])
    assert memory.used(made.memory, Space.UB) <= chips.get(CHIP).capacity(Space.UB)
    assert made.block_dim == chips.get(CHIP).vector_cores


@given(
    rows=st.integers(1, 10**6),
    columns=st.integers(1, 50000),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    centered=st.booleans(),
    chip=st.sampled_from(["950DT", "950PR"]),
)
def test_every_plan_fits_and_covers_the_rows(rows, columns, dtype, centered, chip):
    norm, target = kernel(rows, columns, dtype, centered=centered), chips.get(chip)
    row, weight = (norm.width * size for size in (2 if dtype != "float32" else 4, 4))
    weights = (weight + 256) * (1 + centered)
    try:
        plan = norm.plan(chip)
    except errors.OutOfOnChipMemoryError:
        assert row + weights > target.capacity(Space.UB)
        return
    assert plan.ring * plan.rows * row + weights <= target.capacity(Space.UB)
    assert plan.tiles * plan.rows >= rows > (plan.tiles - 1) * plan.rows
    assert plan.cores <= target.vector_cores and 1 <= plan.rows <= 64
    assert plan.rows == 1 or plan.rows * row <= 32 * 1024
    assert plan.cores == target.vector_cores or plan.ring == 1


def test_what_a_row_needs_is_said():
    with pytest.raises(errors.OutOfOnChipMemoryError, match=r"22000 float32 .* 88064 bytes .* 176640 .* 253952 in all"):
        kernel(1, 22000, centered=True).plan(CHIP)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "float64"}, "dtype='float64'; use one of"),
        ({"rows": 0}, "rows=0 must be positive"),
        ({"columns": 0}, "columns=0 must be positive"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel(2, 8), **change)


def test_fingerprint_follows_what_the_code_depends_on():
    norm = kernel(128, 512)
    assert norm.fingerprint(CHIP) == kernel(128, 512).fingerprint(CHIP)
    changes = ({"rows": 256}, {"columns": 513}, {"centered": True}, {"eps": 1e-5}, {"dtype": "bfloat16"})
    others = {dataclasses.replace(norm, **change).fingerprint(CHIP) for change in changes}
    assert len({norm.fingerprint(CHIP), *others}) == 6
