"""The same programs in several processes on one machine, which the test starts: values, and bits as in a simulation."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 120.0


def outputs(processes: int, devices: int) -> list[str]:
    """What the processes of collective_program.py print; those that are left at the end of the time are killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    program = pathlib.Path(__file__).with_name("collective_program.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(process), str(processes), str(port), str(devices)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    end = time.monotonic() + LIMIT
    try:
        return [process.communicate(timeout=max(end - time.monotonic(), 1))[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_processes_agree_with_numpy_and_with_a_simulation(processes, devices):
    for out in outputs(processes, devices):
        assert "6 collectives agree" in out, out
        assert "expert parallelism agrees" in out, out
        assert "shapes: processes 0 and 1 are about to run different programs: process 0 has 0: float32[4], " in out, (
            out
        )
        assert "process 1 has 0: float32[5]; give every process arrays of the same shapes" in out, out
        assert "programs: processes 0 and 1 are about to run different programs: their arguments are alike" in out, out
