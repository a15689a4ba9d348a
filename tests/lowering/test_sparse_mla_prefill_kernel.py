"""sparse_mla_prefill on the kernel of mla_decode: sound on the chips at the shapes of models."""

import functools

import pytest

import glass_jax as glass
from benchmarks.shapes import sparse_mla_prefill as shapes
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.mla_decode import MlaDecodeKernel

CHIP = "950DT"


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    shape = shapes.SHAPES[name]
    fn = functools.partial(glass.sparse_mla_prefill, implementation="npu_model", **shape.options)
    assert glass.verify(fn, *shape.arguments(), chip=chip) == []


def test_a_query_is_a_block_with_its_tokens_in_two_versions_on_the_chip():
    kernel = MlaDecodeKernel(
        batch=4096, rows=64, d=512, dv=512, pages=8192, page=1, table_pages=640, dtype="bfloat16", scale=512**-0.5,
        queries=1, heads=64,
    )  # fmt: skip
    assert kernel.describe(CHIP) == "4096 blocks of 64 rows, steps of 128 tokens, double-buffered"
    made = cache.compile(kernel, CHIP)
    for space in (Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB):
        assert memory.used(made.memory, space) <= chips.get(CHIP).capacity(space)
