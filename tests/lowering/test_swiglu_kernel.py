"""The kernel of swiglu: what it says of itself, and that the chip has room for what it plans."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.swiglu import SwigluKernel

CHIP = "950DT"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_are_loaded_and_stored_while_others_are_computed(dtype):
    made = cache.compile(SwigluKernel(4096 * 18432, dtype), CHIP)
    assert {a.buffer: (a.nbytes, a.versions) for a in made.memory} == {"a": (32768, 3), "b": (32768, 2)}
    assert memory.used(made.memory, Space.UB) <= chips.get(CHIP).capacity(Space.UB)
    assert made.block_dim == chips.get(CHIP).vector_cores


@given(elements=st.integers(1, 10**9), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
def test_every_plan_covers_the_elements(elements, dtype):
    tile, cores = SwigluKernel(elements, dtype).plan(CHIP)
    assert tile % 64 == 0 and tile * (4 if dtype == "float32" else 2) <= 32 * 1024
    assert cores == min(chips.get(CHIP).vector_cores, math.ceil(elements / tile))


@pytest.mark.parametrize(
    ("change", "match"), [({"dtype": "int8"}, "dtype='int8'; use one of"), ({"elements": 0}, "elements=0 must be")]
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(SwigluKernel(64, "float32"), **change)


def test_fingerprint_follows_what_the_code_depends_on():
    kernels = [SwigluKernel(64, "float32"), SwigluKernel(65, "float32"), SwigluKernel(64, "bfloat16")]
    assert len({kernel.fingerprint(CHIP) for kernel in kernels}) == 3
    assert kernels[0].fingerprint(CHIP) == SwigluKernel(64, "float32").fingerprint(CHIP)
