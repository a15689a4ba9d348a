"""Processes of which one dies: every survivor says which, and what it waits for, within a bound."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from glass_jax import errors
from glass_jax.sharding import peers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROCESSES, LIMIT = 3, 90.0


@contextlib.contextmanager
def job(victim: int, how: str):
    """The processes of peer_program.py; whatever is left of them is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    program = pathlib.Path(__file__).with_name("peer_program.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(process), str(PROCESSES), str(port), str(victim), how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize(
    "victim, how, reason",
    [
        (1, "kill", "was killed or crashed"),
        (0, "kill", "was killed or crashed"),
        (1, "stop", "has been silent for 6 s"),
        (0, "raise", "left with an error: ValueError: a bad batch"),
        (2, "leave", r"left the block after run 1, and process \d has been in run 2 for \d+ s"),
        (1, "inside", "is stuck in run 2, outside of collectives"),
        pytest.param(2, "outside", "is stuck: it has not begun run 2", marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_is_an_error_in_every_other(victim, how, reason):
    with job(victim, how) as processes:
        end = time.monotonic() + LIMIT
        for number, process in enumerate(processes):
            if number == victim:
                continue
            out, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            aborted = (victim, how) == (0, "kill")  # by JAX itself, which cannot do without process 0
            assert process.returncode if aborted else process.returncode == 1, out
            assert re.search(
                rf"process {victim} {reason}.*In process {number}, rank {number} is in all_reduce \(ring\)", out
            ), out
            assert f"rank {number} waits in step" in out, out
            if found := re.search(r"^([\d.]+) \((\d),\) \[(.*)\] process", out, re.MULTILINE):
                assert int(found[2]) == victim and str(number) in found[3]
            else:
                assert aborted, out
        if how == "stop":
            assert processes[victim].poll() is None
            processes[victim].send_signal(signal.SIGKILL)
        elif how == "leave":  # it waited for the others, and learns why they fail
            out, _ = processes[victim].communicate(timeout=max(end - time.monotonic(), 1))
            assert processes[victim].returncode == 1 and re.search(rf"Error: process {victim} {reason}", out), out


def test_processes_wait_for_one_another_at_the_end_of_the_block():
    """Process 0 is the first there, and the last comes after more than the timeout: no run waits meanwhile."""
    with job(PROCESSES, "end") as processes:
        end, times = time.monotonic() + LIMIT, []
        for process in processes:
            out, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            assert process.returncode == 0, out
            times.append([*map(float, re.search(r"came at (\S+) and left at (\S+)", out).groups())])
        came, left = zip(*times, strict=True)
        assert came[0] == min(came) and min(left) >= max(came)


def test_a_single_process_has_nobody_to_lose():
    with peers.watch_peers() as others:
        assert others.run(lambda x: x + 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            others.run(lambda: 1 / 0)
    for name in ("timeout", "deadline"):
        with pytest.raises(errors.CollectiveError, match=f"{name}=0"), peers.watch_peers(**{name: 0}):
            pass
