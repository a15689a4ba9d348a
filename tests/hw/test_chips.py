"""The chip table against published figures."""

import pytest

from glass_jax import errors
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space

KIB = 1024


@pytest.mark.parametrize(
    "name, tflops",
    [("950DT", 432.5), ("910_95", 432.5), ("910B1", 363.7), ("910B3", 294.9), ("910A", 262.1)],
)
def test_peak_rate_is_the_published_one(name, tflops):
    assert chips.get(name).peak_flops("float16") / 1e12 == pytest.approx(tflops, abs=0.1)


@pytest.mark.parametrize(
    "name, dtype, ratio",
    [
        ("950DT", "bfloat16", 1), ("950DT", "int8", 2), ("950DT", "float8_e4m3fn", 2), ("950DT", "float4_e2m1fn", 4),
        ("950DT", "float32", 1 / 16), ("950DT", "hf32", 1 / 2), ("910B1", "int8", 2), ("910B1", "int4", 4),
        ("910B1", "float32", 1 / 4), ("910B1", "hf32", 1 / 2),
    ],
)  # fmt: skip
def test_other_types_relative_to_float16(name, dtype, ratio):
    chip = chips.get(name)
    assert chip.peak_flops(dtype) == ratio * chip.peak_flops("float16")


def test_type_the_cube_does_not_take():
    with pytest.raises(
        errors.HardwareConstraintError, match="910B3 does not take float8_e4m3fn; it takes float16, bfloat16"
    ):
        chips.get("910B3").peak_flops("float8_e4m3fn")


@pytest.mark.parametrize("spelling", ["950DT", "950dt", "Ascend950DT", "ascend950dt", " 950DT "])
def test_spellings(spelling):
    assert chips.get(spelling).soc == "Ascend950DT"


def test_every_name_and_soc_finds_its_chip():
    found = {chips.get(name) for name in chips.names()}
    assert len(found) == len(chips.names()) == 20
    for chip in found:
        assert chips.get(chip.name) is chip
        assert chips.get(chip.soc) is chip
        assert chip.source


def test_910c_is_one_of_its_dies():
    assert chips.get("910C") is chips.get("Ascend910_9392")
    assert chips.get("910C").cube_cores == 24


@pytest.mark.parametrize(
    "name, hint",
    [
        ("910B", "910B1 or 910B2"),
        ("950", "950PR or 950DT"),
        ("950TD", "950DT"),
        ("910B5", "910B"),
        ("H100", "known chips are 910A"),
    ],
)
def test_unknown_chip_names_the_closest(name, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        chips.get(name)
    assert isinstance(caught.value, errors.HardwareConstraintError)
    assert "950PR, 950DT" in str(caught.value)


def test_only_the_950_has_a_generator():
    assert [name for name in chips.names() if chips.get(name).has_generator] == ["950PR", "950DT"]


@pytest.mark.parametrize(
    "name, space, capacity",
    [
        ("950DT", Space.UB, 248 * KIB), ("950DT", Space.L1, 512 * KIB), ("950DT", Space.L0C, 256 * KIB),
        ("950DT", Space.L0A, 64 * KIB), ("910B3", Space.UB, 192 * KIB - 256 - 8 * KIB), ("910B3", Space.L0C, 128 * KIB),
        ("910A", Space.L1, 1024 * KIB), ("910B1", Space.GM, 64 * KIB**3),
        ("950DT", Space.GM, None), ("950DT", Space.SCALAR, None),
    ],
)  # fmt: skip
def test_capacity(name, space, capacity):
    assert chips.get(name).capacity(space) == capacity


def test_copy_rates():
    assert chips.get("950DT").bytes_per_cycle[Space.L1, Space.L0B] == 256
    assert chips.get("910B1").bytes_per_cycle[Space.L1, Space.L0B] == 128
    assert (Space.L0C, Space.UB) not in chips.get("910B1").bytes_per_cycle
    assert chips.get("910B1").gib_per_second[Space.GM, Space.UB] == pytest.approx(100.9)


def test_chips_are_hashable_and_read_only():
    chip = chips.get("950DT")
    assert hash(chip) == hash(chips.get("Ascend950DT"))
    with pytest.raises(TypeError):
        chip.cube_k["float64"] = 1
