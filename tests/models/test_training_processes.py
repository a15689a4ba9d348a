"""Training in processes of its own: one that is killed and resumed, and two that share a mesh."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 240.0
STEPS = 24


def start(output: pathlib.Path, **changes) -> subprocess.Popen:
    defaults = {"devices": 2, "processes": 1, "process": 0, "port": 0, "steps": STEPS, "every": 2, "resume": False}
    options = defaults | {"output": str(output)} | changes
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # much of their time is XLA's compiler
    environment.pop("XLA_FLAGS", None)
    program = pathlib.Path(__file__).with_name("training_program.py")
    return subprocess.Popen(
        [sys.executable, str(program), json.dumps(options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(process: subprocess.Popen) -> tuple[np.ndarray, str]:
    """What a process that trained to the end prints; it is killed if it has not ended in time."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("losses ")]
    return np.array([float.fromhex(text) for text in line.split()[1:]]), out


@pytest.mark.slow
def test_a_killed_run_goes_on_and_two_processes_train_alike(tmp_path):
    # All at once: what they mostly do is compile.
    whole, victim = start(tmp_path / "whole"), start(tmp_path / "killed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    two = [start(tmp_path / "two", processes=2, process=process, port=port) for process in range(2)]
    try:
        end = time.monotonic() + LIMIT
        saved = lambda: [path for path in (tmp_path / "killed").glob("*") if path.name.isdecimal()]  # noqa: E731
        while len(saved()) < 1 and victim.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert saved(), "no checkpoint in time"
        victim.kill()
        victim.communicate()
        expected, _ = losses(whole)
        resumed, out = losses(start(tmp_path / "killed", resume=True))
        together = [losses(process)[0] for process in two]
    finally:
        for process in (whole, victim, *two):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert len(expected) == STEPS
    assert 0 < int(out.split()[2]) <= STEPS
    np.testing.assert_array_equal(resumed, expected)
    for each in together:
        np.testing.assert_allclose(each, expected, rtol=0, atol=1e-4)
