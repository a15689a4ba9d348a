"""How times are taken, and what a benchmark reports."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

ROUNDS = 3
ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One number that the measured times give, and the promise it is held against.

    Attributes:
      text: what the number is.
      value: the number.
      unit: ``"x"`` for a ratio, ``"s"`` for seconds.
      promise: for example ``("at most", 1.5)`` or ``("at least", 8)``; None where nothing is promised.
      remark: what a reader must know to judge it, or empty.
    """

    text: str
    value: float
    unit: Literal["x", "s"] = "x"
    promise: tuple[Literal["at most", "at least"], float] | None = None
    remark: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        if self.promise is None:
            return None
        word, limit = self.promise
        return self.value <= limit if word == "at most" else self.value >= limit

    def __str__(self) -> str:
        digits, unit = (3, " s") if self.unit == "s" else (2, self.unit)
        line = f"{self.text}: {self.value:.{digits}f}{unit}"
        if self.promise is not None:
            word, limit = self.promise
            line += f" (promised: {word} {limit:g}{unit}) {'met' if self.met else 'NOT MET'}"
        return line + (f"; {self.remark}" if self.remark else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """What one benchmark found.

    Attributes:
      title: what was measured.
      seconds: the time of each side, by its name.
      verdicts: the numbers that follow.
    """

    title: str
    seconds: Mapping[str, float]
    verdicts: Sequence[Verdict]


def interleaved(sides: Mapping[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, float]:
    """Times functions against each other, fairly on a noisy machine.

    Each function is called once to compile. Then, in three rounds, the functions are called in turn until a round has
    taken ``seconds`` for each of them (at least five turns); the result is the best of the three medians.

    Args:
      sides: functions that return JAX arrays, by name.
      seconds: budget for each function and round.

    Returns:
      Seconds a call, by name.
    """
    for function in sides.values():
        jax.block_until_ready(function())
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        times: dict[str, list[float]] = {name: [] for name in sides}
        end = time.perf_counter() + seconds * len(sides)
        while time.perf_counter() < end or min(map(len, times.values())) < 5:
            for name, function in sides.items():
                start = time.perf_counter()
                jax.block_until_ready(function())
                times[name].append(time.perf_counter() - start)
        for name in sides:
            medians[name].append(statistics.median(times[name]))
    return {name: min(values) for name, values in medians.items()}


def python(code: str, environment: Mapping[str, str] | None = None) -> str:
    """What ``code`` prints in a fresh Python process, started in the repository."""
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | dict(environment or {}), cwd=ROOT, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"a process that was to be measured failed:\n{code}\n{result.stderr}")
    return result.stdout
