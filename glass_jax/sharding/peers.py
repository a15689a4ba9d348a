"""Processes that watch one another, so that a killed one is an error in the others and not a wait without end.

Of its own accord JAX lets a survivor wait inside a collective: gloo fails only where the dead process was the one it
was talking to, and the heartbeats of ``jax.distributed`` abort the whole process after a minute or two. Here every
process holds a connection to every other. The kernel closes those of a killed process at once; one that is stopped or
cut off is missed after a timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from glass_jax import config, errors
from glass_jax.sharding import faults, profiler

_BEATS = 5  # heartbeats in a timeout
_GRACE = 1.0  # seconds within which a loss that made a collective fail is noticed
_LEFT, _BEAT = b"left\n", b".\n"
_TOKEN_BYTES = 8

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Peer:
    """The connection to a process."""

    process: int
    connection: socket.socket
    heard: float
    received: bytes = b""


class Peers:
    """The other processes of a job; made by :func:`watch_peers`."""

    def __init__(self, timeout: float, host: str):
        self._timeout, self._lost, self._changed = timeout, {}, threading.Condition()
        self._closing, self._running = False, profiler.Profile()
        self._peers = _connect(timeout, host)
        self._thread = threading.Thread(target=self._watch, name="glass peers", daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, waited for, unless a process is lost meanwhile.

        The function runs in a thread of its own, which is left behind if a process is lost: contexts of JAX, such as
        ``jax.set_mesh``, belong inside the function. Its collectives are marked, as by ``profile``.

        Returns:
          Its result; all arrays in it are ready.

        Raises:
          PeerFailureError: a process was killed, left with an error, or was silent for the timeout. The same is
            logged. When this process ends then, it is with exit code 1 and without the shutdown of
            ``jax.distributed``, which cannot succeed.
        """
        outcome: list[tuple[Any, BaseException | None]] = []
        options = dataclasses.asdict(config.current())

        def work() -> None:
            try:
                with config.configure(**options), profiler.profile() as self._running:
                    end = jax.block_until_ready(function(*args)), None
            except BaseException as error:  # handed to the caller
                end = None, error
            with self._changed:
                outcome.append(end)
                self._changed.notify_all()

        threading.Thread(target=work, name="glass collective", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._lost or outcome)
            # A collective may fail before the loss that it fails from is noticed, or succeed in spite of it.
            self._changed.wait_for(lambda: outcome and (self._lost or outcome[0][1] is None), timeout=_GRACE)
        result, error = outcome[0] if outcome else (None, None)
        if outcome and error is None:
            return result
        if not self._lost:
            raise error
        text, waits = self._state()
        raise errors.PeerFailureError(text, tuple(sorted(self._lost)), waits) from error

    def _state(self) -> tuple[str, tuple[faults.Wait, ...]]:
        """Which processes are lost and what the ranks here wait for; then what every rank waits for, if it is known."""
        devices = jax.devices()
        dead = [rank for rank, device in enumerate(devices) if device.process_index in self._lost]
        text = "; ".join(f"process {process} {reason}" for process, reason in sorted(self._lost.items()))
        waits: dict[faults.Wait, None] = {}
        here = []
        for call, rank in self._running.unfinished():
            where = f"rank {rank} is in {call.name} ({call.algorithm}) over {', '.join(call.over.axes)}"
            schedule = call.schedule()
            if call.over.ranks == len(devices) and schedule is not None:  # so that ranks are numbered as devices are
                found = faults.waits(schedule, dead)
                where += "".join(f": {wait}" for wait in found if wait.rank == rank)
                waits |= dict.fromkeys(found)
            here.append(where)
        waiting = f". In process {jax.process_index()}, {'; '.join(here)}" if here else ""
        return f"{text}{waiting}. Restart the job from a checkpoint; this process exits with code 1", tuple(waits)

    def _watch(self) -> None:
        """Sends heartbeats and listens to those of others, until the block ends."""
        interval = self._timeout / _BEATS
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            beat = 0.0
            while not self._closing and selector.get_map():
                now = time.monotonic()
                if now >= beat:
                    beat = now + interval
                    for peer in self._peers:
                        _send(peer, _BEAT)
                for key, _ in selector.select(max(beat - time.monotonic(), 0)):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                for key in list(selector.get_map().values()):
                    if time.monotonic() - key.data.heard > self._timeout:
                        self._lose(key.data.process, f"has been silent for {self._timeout:g} s: stopped, or cut off")
                        selector.unregister(key.fileobj)

    def _hear(self, peer: _Peer) -> bool:
        """Reads what a peer sent; returns whether more is to come."""
        try:
            data = peer.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._lose(peer.process, "was killed or crashed: its connection closed without a word")
            return False
        peer.heard = time.monotonic()
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            if line + b"\n" == _LEFT:
                return False
            if line.startswith(b"failed "):
                consequence = self._lost and line.startswith(b"failed PeerFailureError")
                if not consequence:
                    self._lose(peer.process, f"left with an error: {line[7:].decode()}")
                return False
        return True

    def _lose(self, process: int, reason: str) -> None:
        with self._changed:
            self._lost.setdefault(process, reason)
            _exit_without_shutdown()
            self._changed.notify_all()
            # At once: without process 0, which coordinates jax.distributed, JAX aborts this process within moments.
            _logger.error("%s", self._state()[0])

    def close(self, error: BaseException | None) -> None:
        """Tells the others that this process leaves, and why if it is for an error."""
        self._closing = True
        self._thread.join()
        if error is not None:
            _exit_without_shutdown()
        failure = f"failed {type(error).__name__}: {error}".replace("\n", " ")
        farewell = _LEFT if error is None else failure.encode() + b"\n"
        for peer in self._peers:
            _send(peer, farewell)
            peer.connection.close()


def _send(peer: _Peer, message: bytes) -> None:
    with contextlib.suppress(OSError):  # whether it is alive is for _hear to say
        peer.connection.sendall(message)


@contextlib.contextmanager
def watch_peers(*, timeout: float = 10.0, host: str | None = None) -> Iterator[Peers]:
    """Watches the other processes of ``jax.distributed`` for the length of a block, which all processes enter.

    ``with glass.sharding.watch_peers() as peers: state = peers.run(train_step, state, batch)``

    A process that is killed, leaves the block with an exception or is silent for ``timeout`` seconds raises
    ``PeerFailureError`` in ``run`` of every other, which says what the ranks there wait for: at once, or after the
    timeout. A process that leaves with an exception ends with exit code 1. If process 0 is killed, which coordinates
    ``jax.distributed``, JAX itself aborts the others soon after: the error is in their logs.

    Args:
      timeout: seconds of silence after which a process counts as lost, and for the processes to find one another at
        first.
      host: the address of this machine at which the others reach it; by default that of its name.

    Raises:
      PeerFailureError: the processes did not all reach one another.
      CollectiveError: the timeout is not positive.
    """
    if not timeout > 0:
        raise errors.CollectiveError(f"watch_peers: {timeout=} must be above 0 seconds")
    peers = Peers(timeout, host or socket.gethostbyname(socket.gethostname()))
    try:
        yield peers
    except BaseException as error:
        peers.close(error)
        raise
    peers.close(None)


def _connect(timeout: float, host: str) -> list[_Peer]:
    """A connection to every other process: each calls those before it, and shows the word that they gave out."""
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
    return [_Peer(process, connection, now) for process, connection in sorted(connections.items())]


@functools.cache
def _exit_without_shutdown() -> None:
    """Makes the process end before JAX's exit handlers: their shutdown barrier waits for the dead, and then aborts."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(leave)
