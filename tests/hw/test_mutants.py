"""Kernels with one mistake are reported, or give a wrong result on the model; good ones are not reported."""

import jax
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.hw import chips, verifier
from glass_jax.hw.model import executor
from tests.hw import mutants, synced

CHIP = chips.get("950DT")
CASES = synced.all_cases()


def result(case, program):
    run = jax.jit(lambda *args: executor.run(program, args, case.outputs))
    return np.asarray(run(*case.args)[-1], np.float64)


def is_right(case, program):
    scale = max(1.0, np.abs(case.expected).max())
    return bool((np.abs(result(case, program) - case.expected) <= 1e-4 * scale).all())  # a NaN is not


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_good_kernels(case):
    assert verifier.verify(case.program, CHIP) == []
    assert is_right(case, case.program)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mutants_are_caught(case):
    missed = []
    for what, mutant in mutants.mutants(case.program):
        if verifier.verify(mutant, CHIP):
            continue
        try:
            caught = not is_right(case, mutant)
        except errors.GlassError:
            caught = True
        if not caught:
            missed.append(what)
    assert missed == []


def test_there_are_enough_mutants():
    counts = {case.name: len(list(mutants.mutants(case.program))) for case in CASES}
    assert len(counts) >= 10
    assert sum(counts.values()) >= 50
