"""Options: environment, context manager, setter, and their errors."""

import os
import subprocess
import sys
import threading

import pytest

import glass_jax as glass
from glass_jax import config


def test_blocks_nest_and_return():
    before = config.current()
    with glass.configure(chip="950PR") as inner:
        assert inner.chip == config.current().chip == "950PR"
        with glass.configure(alignment="strict"):
            assert (config.current().chip, config.current().alignment) == ("950PR", "strict")
        assert config.current() == inner
    assert config.current() == before


def test_a_block_that_raises_returns_too():
    before = config.current()
    with pytest.raises(RuntimeError, match="inside"), glass.configure(implementation="npu_model"):
        raise RuntimeError("inside")
    assert config.current() == before


def test_setter_stays_until_changed():
    before = config.current()
    glass.configure(implementation="npu_model")
    try:
        assert config.current().implementation == "npu_model"
    finally:
        glass.configure(implementation=before.implementation)
    assert config.current() == before


def test_a_block_is_of_its_own_thread():
    seen = []
    with glass.configure(implementation="npu_model"):
        thread = threading.Thread(target=lambda: seen.append(config.current().implementation))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is not one of xla, npu_model, host, ascend"),
        ({"chip": "H100"}, glass.errors.HardwareConstraintError, "950DT"),
        ({"alignment": "maybe"}, ValueError, "pad, strict"),
        ({"debug": "yes"}, TypeError, "bool"),
        ({"implementaton": "xla"}, TypeError, "unknown option 'implementaton'; the options are implementation, chip"),
    ],
)
def test_bad_options_change_nothing(options, error, message):
    before = config.current()
    with pytest.raises(error, match=message):
        glass.configure(**options)
    assert config.current() == before


def _python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
    )


def test_environment_sets_the_defaults():
    code = "from glass_jax import config; print(config.current())"
    out = _python(
        code, GLASS_IMPLEMENTATION="npu_model", GLASS_CHIP="ascend950pr", GLASS_ALIGNMENT="strict", GLASS_DEBUG="1"
    )
    assert out.stdout.strip() == "Config(implementation='npu_model', chip='950PR', alignment='strict', debug=True)", (
        out.stderr
    )


@pytest.mark.parametrize(
    ("name", "value"), [("GLASS_IMPLEMENTATION", "tpu"), ("GLASS_CHIP", "H100"), ("GLASS_DEBUG", "maybe")]
)
def test_a_bad_environment_says_which_variable(name, value):
    out = _python("from glass_jax import config; config.current()", **{name: value})
    assert out.returncode != 0
    assert f"{name}={value}" in out.stderr
