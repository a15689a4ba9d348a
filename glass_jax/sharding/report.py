"""How plans and profiles print: sizes and times in fitting units, and Chrome traces."""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

from glass_jax import errors

_UNITS = {"": 1, "B": 1, "K": 2**10, "KB": 10**3, "KIB": 2**10, "M": 2**20, "MB": 10**6, "MIB": 2**20}
_UNITS |= {"G": 2**30, "GB": 10**9, "GIB": 2**30}


def size(nbytes: float) -> str:
    """A number of bytes in the largest binary unit that does not make it less than 1."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"


def parse_size(text: str) -> int:
    """The number of bytes that ``"64MiB"``, ``"64M"``, ``"1.5 GB"`` or ``"4096"`` stands for; K, M, G count by 1024.

    Raises:
      CollectiveError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise errors.CollectiveError(f"{text!r} is no size; write 65536, 64KiB, 64MiB or 1GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def microseconds(seconds: float) -> str:
    """A time as a number of microseconds, with four digits or all of them."""
    value = seconds * 1e6
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


class Trace:
    """Events on tracks, in the JSON form that Perfetto and chrome://tracing read."""

    def __init__(self):
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], int] = {}

    def add(self, process: str, track: str, name: str, start: float, seconds: float, **details: Any) -> None:
        """An event of ``seconds`` from second ``start`` on, on ``track`` of ``process``."""
        if process not in self._processes:
            self._processes[process] = len(self._processes) + 1
            self._name("process_name", self._processes[process], 0, process)
        pid = self._processes[process]
        if (process, track) not in self._tracks:
            self._tracks[process, track] = len(self._tracks) + 1
            self._name("thread_name", pid, self._tracks[process, track], track)
        tid = self._tracks[process, track]
        event = {
            "ph": "X",
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": start * 1e6,
            "dur": seconds * 1e6,
            "args": details,
        }
        self._events.append(event)

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to ``path``; open it at https://ui.perfetto.dev."""
        pathlib.Path(path).write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"}))
