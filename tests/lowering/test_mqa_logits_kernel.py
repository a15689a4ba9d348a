"""The kernel of mqa_logits: sound on the chips at the shapes of models, its tiles, what it does not take."""

import dataclasses
import functools
import json

import jax
import pytest

import glass_jax as glass
from benchmarks.shapes.mqa_logits import SHAPES
from glass_jax import errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.lowering.tilelang.kernels.mqa_logits import MqaLogitsKernel

CHIP = "950DT"
function = jax.jit(functools.partial(glass.mqa_logits, implementation="ascend"))

FEW = {("v3.2_1x32768", "950DT"), ("v3.2_128x4096", "950PR"), ("v3.2_ragged", "950DT"), ("v3.2_training", "950PR"),
       ("odd", "950DT"), ("one", "950PR")}  # fmt: skip
CASES = [
    pytest.param(name, chip, marks=() if (name, chip) in FEW else pytest.mark.slow)
    for name in SHAPES
    for chip in ("950DT", "950PR")
]


@pytest.mark.parametrize(("name", "chip"), CASES)
def test_no_chip_of_its_kind_rejects_it(name, chip):
    assert glass.verify(function, *SHAPES[name].arguments(), chip=chip) == []


def test_it_is_exported(tmp_path):
    glass.export(function, *SHAPES["v3.2_1x32768"].arguments(), path=tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    (kernel,) = manifest["kernels"].values()
    assert kernel["entry"].startswith("mqa_logits_float8_e4m3fn_1x1x64x32768x128")
    assert [argument["dtype"] for argument in kernel["launches"][0]["arguments"]] == [
        "float8_e4m3fn", "float8_e4m3fn", "float32", "float32", "int32", "int32", "float32",
    ]  # fmt: skip


def kernel(**changes) -> MqaLogitsKernel:
    sizes = {"batch": 1, "queries": 3, "heads": 64, "keys": 1000, "d": 128, "dtype": "float8_e4m3fn"}
    return MqaLogitsKernel(**(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "blocks", "queries"),
    [
        ({"queries": 4096, "keys": 4096, "dtype": "bfloat16"}, 2048, 2),
        ({"queries": 1, "keys": 32768}, 32, 1),  # keys shared out between all cores
        ({"queries": 1, "keys": 300}, 2, 1),  # a step of keys for each
        ({"queries": 33, "heads": 8, "d": 32}, 12, 16),
        ({"heads": 128, "queries": 5, "dtype": "float32"}, 20, 1),
    ],
    ids=str,
)
def test_blocks_for_all_cores_and_buffers_for_all_pipes(changes, blocks, queries):
    this, chip = kernel(**changes), chips.get(CHIP)
    made = cache.compile(this, CHIP)
    assert made.block_dim == blocks and f"blocks of {queries} queries" in this.describe(CHIP)
    versions = {allocation.buffer: allocation.versions for allocation in made.memory}
    assert all(versions[buffer] == 2 for buffer in ("k_l1", "s_l0c", "s", "total", "scales"))
    assert made.workspace_bytes == 0
    for space in (Space.L1, Space.L0C, Space.UB):
        assert memory.used(made.memory, space) <= chip.capacity(space)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"d": 48}, "d=48 must be a positive multiple of 32"),
        ({"d": 12, "dtype": "float16"}, "d=12 must be a positive multiple of 16"),
        ({"heads": 12}, "heads=12 must be a positive multiple of 8"),
        ({"heads": 136}, "heads=136 is more than 128"),
        ({"keys": 0}, "keys=0"),
        ({"dtype": "float8_e5m2"}, "dtype='float8_e5m2'"),
    ],
)
def test_what_the_kernel_does_not_take(change, match):
    with pytest.raises(errors.HardwareConstraintError, match=match):
        dataclasses.replace(kernel(), **change)


def test_fingerprint_follows_what_the_code_depends_on():
    changes = ({"batch": 2}, {"queries": 4}, {"heads": 32}, {"keys": 999}, {"d": 64}, {"dtype": "bfloat16"})
    others = [dataclasses.replace(kernel(), **change).fingerprint(CHIP) for change in changes]
    assert len({kernel().fingerprint(CHIP), *others}) == 7
    assert kernel().fingerprint(CHIP) == kernel().fingerprint(CHIP)
