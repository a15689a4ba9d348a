"""The kernel of topk: what it says of itself, and that the chip has room for it twice buffered."""

import dataclasses

import pytest

from benchmarks.shapes.topk import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.topk import TopkKernel

CHIP = "950DT"


def kernel(rows=2, columns=1000, k=10, dtype="float32") -> TopkKernel:
    return TopkKernel(rows=rows, columns=columns, k=k, dtype=dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_tiles_are_loaded_while_others_are_searched(name):
    made = cache.compile(TopkKernel(*SHAPES[name]), CHIP)
    (tile,) = [allocation for allocation in made.memory if allocation.buffer == "tile"]
    assert tile.versions == 2
    assert memory.used(made.memory, Space.UB) <= chips.get(CHIP).capacity(Space.UB)
    assert made.block_dim == min(SHAPES[name].rows, chips.get(CHIP).vector_cores)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "float64"}, "dtype='float64'; use one of"),
        ({"rows": 0}, "rows=0 must be positive"),
        ({"columns": 0}, "columns=0 must be positive"),
        ({"k": 0}, "k=0 must be positive"),
        ({"k": 4097}, "k=4097 is more than 4096"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel(), **change)


def test_fingerprint_follows_what_the_code_depends_on():
    changes = ({"rows": 3}, {"columns": 999}, {"k": 11}, {"dtype": "bfloat16"})
    assert len({kernel().fingerprint(CHIP), *(kernel(**change).fingerprint(CHIP) for change in changes)}) == 5
    assert kernel().fingerprint(CHIP) == kernel().fingerprint(CHIP)
