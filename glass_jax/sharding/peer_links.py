"""The connections between the processes of a job, and what they say over them: a line at a time.

Lines are ``at`` with a :class:`Progress`, which is also the heartbeat, ``lost`` with a process and what is wrong with
it, and ``failed`` with the error that the sender leaves with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import selectors
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from glass_jax import errors

AT, LOST, FAILED = "at", "lost", "failed"
_TOKEN_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a process is.

    Attributes:
      begun: calls of ``run`` that began.
      ended: those that ended.
      waiting: whether one of its ranks is in a collective of ``glass_jax.sharding``.
      left: whether it has left the block.
    """

    begun: int = 0
    ended: int = 0
    waiting: bool = False
    left: bool = False

    def __str__(self) -> str:
        return f"{self.begun} {self.ended} {self.waiting:d} {self.left:d}"

    @classmethod
    def parse(cls, text: str) -> Progress:
        """From what ``str`` made of it."""
        begun, ended, waiting, left = map(int, text.split())
        return cls(begun, ended, bool(waiting), bool(left))


@dataclasses.dataclass(eq=False)
class Peer:
    """Another process, and the connection to it.

    Attributes:
      process: its index.
      connection: closed by the kernel when the process ends, however it does.
      heard: when something came last, seconds of ``time.monotonic``.
      progress: what it said last.
      since: when that became different from what it said before.
    """

    process: int
    connection: socket.socket
    heard: float
    progress: Progress = Progress()
    since: float = 0.0
    _received: bytes = b""

    def say(self, word: str, what: object) -> None:
        """Sends a line."""
        line = f"{word} {what}".replace("\n", " ")
        with contextlib.suppress(OSError):  # whether it is alive is for hear to say
            self.connection.sendall(line.encode() + b"\n")

    def hear(self) -> list[tuple[str, str]] | None:
        """The lines that have come: first word and rest. None: the connection is closed, and nothing more comes."""
        try:
            data = self.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        said = []
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == AT and (progress := Progress.parse(rest)) != self.progress:
                self.progress, self.since = progress, self.heard
            said.append((word, rest))
        return said


def connect(timeout: float, host: str) -> list[Peer]:
    """A connection to every other process: each calls those before it, and shows the word that they gave out.

    Raises:
      PeerFailureError: not all were reached within ``timeout`` seconds.
    """
    me, count = jax.process_index(), jax.process_count()
    if count == 1:
        return []
    deadline = time.monotonic() + timeout
    with socket.create_server((host, 0), backlog=count) as server:
        word = secrets.token_bytes(_TOKEN_BYTES)
        entry = socket.inet_aton(host) + server.getsockname()[1].to_bytes(2) + word
        entries = multihost_utils.process_allgather(np.frombuffer(entry, np.uint8))
        connections: dict[int, socket.socket] = {}
        try:
            for process in range(me):
                other = np.asarray(entries[process]).tobytes()
                address = socket.inet_ntoa(other[:4]), int.from_bytes(other[4:6])
                connection = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.01))
                connection.sendall(other[6:] + me.to_bytes(4))
                connections[process] = connection
            while len(connections) < count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, _ = server.accept()
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                greeting = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
                if greeting[:_TOKEN_BYTES] == word:
                    connections[int.from_bytes(greeting[_TOKEN_BYTES:])] = connection
                else:
                    connection.close()
        except OSError as error:
            missing = tuple(process for process in range(count) if process != me and process not in connections)
            raise errors.PeerFailureError(
                f"process {me} at {host} did not reach processes {', '.join(map(str, missing))} within {timeout:g} s: "
                f"{error}. Pass watch_peers(host=...) the address at which each machine is reached, and see that no "
                "firewall is between them",
                missing,
            ) from error
    now = time.monotonic()
    for connection in connections.values():
        connection.settimeout(timeout)
    return [Peer(process, connection, now, since=now) for process, connection in sorted(connections.items())]


def wait_for_ends(peers: list[Peer], timeout: float) -> None:
    """Returns when the processes of ``peers`` have ended, or after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data.hear() is None:
                    selector.unregister(key.fileobj)
