"""The paged_attention kernel: sound on the chips at the shapes of models, its tiles, what it does not take."""

import dataclasses
import json

import jax
import pytest

import glass_jax as glass
from benchmarks.shapes.paged_attention import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.paged_attention import PagedAttentionKernel, Rows

CHIP = "950DT"


def kernel(**changes) -> PagedAttentionKernel:
    sizes = {"batch": 2, "groups": 4, "kv_heads": 2, "head_dim": 128, "pages": 9, "page": 16, "table_pages": 20}
    return PagedAttentionKernel(**(sizes | {"dtype": "bfloat16", "scale": 0.125} | changes))


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    f = jax.jit(lambda *args: glass.paged_attention(*args, implementation="npu_model"))
    assert glass.verify(f, *SHAPES[name].arguments(), chip=chip) == []


def test_it_is_exported(tmp_path):
    glass.export(jax.jit(glass.paged_attention), *SHAPES["llama_3_8b"].arguments(), path=tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    (exported,) = manifest["kernels"].values()
    assert exported["entry"].startswith("paged_attention_bfloat16_8x8x4x128")


@pytest.mark.parametrize(
    ("changes", "streamed"),
    [({}, 2), ({"groups": 64, "head_dim": 256}, 2), ({"groups": 64, "head_dim": 512}, 1)],
    ids=["llama", "widest_doubled", "widest"],
)
def test_intermediates_stay_on_chip_and_copies_overlap(changes, streamed):
    made = cache.compile(kernel(**changes), CHIP)
    chip = chips.get(CHIP)
    for space in (Space.L1, Space.L0A, Space.L0B, Space.L0C, Space.UB):
        assert memory.used(made.memory, space) <= chip.capacity(space)
    versions = {a.buffer: a.versions for a in made.memory}
    assert versions["k_l1"] == versions["v_l1"] == streamed
    assert {versions[name] for name in ("s_l0c", "o_l0c", "s", "p", "product")} == {2}
    assert made.workspace_bytes == 0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(1, (1, 1, 8)), (4, (1, 2, 8)), (7, (1, 4, 8)), (32, (1, 16, 16)), (64, (1, 32, 32)), (71, (2, 18, 24))],
)
def test_heads_are_shared_out_evenly_between_the_vector_units(groups, expected):
    assert Rows.of(groups, 128) == expected
    assert Rows.of(groups, 512).half <= 16
    tiles, live, half = expected
    assert 2 * tiles * live >= groups and half % 8 == 0 and half <= 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 16, 16, 256, 2)),
        ({"page": 64}, (1, 4, 64, 256, 2)),
        ({"page": 48}, (1, 5, 48, 256, 2)),
        ({"page": 576}, (3, 1, 192, 256, 2)),
        ({"page": 592}, (37, 16, 16, 256, 2)),
        ({"page": 64, "head_dim": 256}, (1, 2, 64, 128, 2)),
        ({"page": 64, "head_dim": 256, "dtype": "float32"}, (1, 1, 64, 64, 2)),
        ({"page": 64, "head_dim": 512}, (1, 2, 64, 128, 1)),
    ],
    ids=str,
)
def test_tiles(changes, expected):
    plan = kernel(**changes).plan(CHIP)
    assert dataclasses.astuple(plan) == expected
    assert plan.parts * plan.part == changes.get("page", 16)


def test_description_and_fingerprint():
    one, other = kernel(), kernel(scale=0.5)
    assert one.describe(CHIP) == (
        "4 blocks of 4 heads in 16 rows, tiles of 16 x 16 tokens in 256 columns (a page in 1 parts), double-buffered"
    )
    assert one == kernel() and one.fingerprint(CHIP) != other.fingerprint(CHIP)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page": 20}, "page=20 must be a positive multiple of 16"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"groups": 0}, "groups=0 must be a positive multiple of 1"),
        ({"dtype": "float64"}, "dtype='float64'"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        kernel(**change)


def test_heads_that_do_not_fit_say_so():
    with pytest.raises(
        errors.OutOfOnChipMemoryError, match=r"D 4096 in float32 take l1 \d+ of 524288 bytes.* of 950DT"
    ):
        kernel(head_dim=4096, dtype="float32").plan(CHIP)
