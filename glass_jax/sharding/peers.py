"""Processes that watch one another, so that a lost one is an error in the others and not a wait without end.

Of its own accord JAX lets a survivor wait inside a collective: gloo fails only where the dead process was the one it
was talking to, and the heartbeats of ``jax.distributed`` abort the whole process after a minute or two. Here every
process holds a connection to every other. The kernel closes those of a killed process at once; one that is stopped or
cut off is missed after a timeout. One that lives, but does not take part, is found by what each says of how far it is.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from glass_jax import config, errors
from glass_jax.sharding import faults, peer_links, profiler
from glass_jax.sharding.peer_links import AT, FAILED, LOST, Peer, Progress

_BEATS = 5  # heartbeats in a timeout

_logger = logging.getLogger(__name__)


class Peers:
    """The other processes of a job; made by :func:`watch_peers`."""

    def __init__(self, timeout: float, deadline: float | None, host: str):
        self._timeout, self._deadline = timeout, deadline
        self._lost: dict[int, str] = {}
        self._wrong = ""  # what is wrong where no process is to blame
        self._changed = threading.Condition()
        self._closing, self._running = False, profiler.Profile()
        self._begun = self._ended = 0  # runs
        self._since: float | None = None  # when this process came to where it may wait: in a run, or at the block's end
        self._left = False
        self._peers = peer_links.connect(timeout, host)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="glass peers", daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, waited for, unless a process is lost meanwhile.

        The function runs in a thread of its own, which is left behind if a process is lost: contexts of JAX, such as
        ``jax.set_mesh``, belong inside the function. Its collectives are marked, as by ``profile``.

        Returns:
          Its result; all arrays in it are ready.

        Raises:
          PeerFailureError: a process was killed, left with an error, or was silent for the timeout; left before this
            run, which has not ended a timeout later; or is stuck, see ``deadline`` of :func:`watch_peers`. The same is
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

        with self._changed:
            if self._failed:
                raise self._failure()
            self._begun, self._since = self._begun + 1, time.monotonic()
            threading.Thread(target=work, name="glass collective", daemon=True).start()
            self._changed.wait_for(lambda: self._failed or outcome)
            if outcome and isinstance(outcome[0][1], jax.errors.JaxRuntimeError) and self._peers:
                # A collective may fail before the loss that it fails from is noticed.
                self._changed.wait_for(lambda: self._failed, timeout=self._timeout)
            self._since = None
        result, error = outcome[0] if outcome else (None, None)
        if outcome and error is None:
            self._ended = self._begun
            return result
        if not self._failed:
            raise error
        raise self._failure() from error

    @property
    def _failed(self) -> bool:
        return bool(self._lost or self._wrong)

    def _failure(self) -> errors.PeerFailureError:
        """Which processes are lost and what the ranks here wait for; then what every rank waits for, if it is known."""
        devices = jax.devices()
        dead = [rank for rank, device in enumerate(devices) if device.process_index in self._lost]
        text = "; ".join(f"process {process} {reason}" for process, reason in sorted(self._lost.items()))
        waits: dict[faults.Wait, None] = {}
        here = []
        for call, rank, _ in self._running.unfinished():
            where = f"rank {rank} is in {call.name} ({call.algorithm}) over {', '.join(call.over.axes)}"
            schedule = call.schedule()
            if call.over.ranks == len(devices) and schedule is not None:  # so that ranks are numbered as devices are
                found = faults.waits(schedule, dead)
                where += "".join(f": {wait}" for wait in found if wait.rank == rank)
                waits |= dict.fromkeys(found)
            here.append(where)
        waiting = f". In process {jax.process_index()}, {'; '.join(here)}" if here else ""
        advice = "Restart the job from a checkpoint; this process exits with code 1"
        return errors.PeerFailureError(
            f"{text or self._wrong}{waiting}. {advice}", tuple(sorted(self._lost)), tuple(waits)
        )

    # --- the thread that watches ---

    def _watch(self) -> None:
        """Sends heartbeats, listens to those of others, and looks for who is stuck, until the block ends."""
        interval = self._timeout / _BEATS
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            beat = 0.0
            while not self._closing and self._peers:
                now = time.monotonic()
                if now >= beat:
                    beat = now + interval
                    for peer in self._peers:
                        peer.say(AT, self._progress())
                for key, _ in selector.select(max(beat - time.monotonic(), 0)):
                    if key.data is None:
                        beat = 0.0  # there is news to tell
                        self._woken.recv(1)
                    elif not self._hear(key.data):
                        selector.unregister(key.fileobj)
                for key in [key for key in selector.get_map().values() if key.data is not None]:
                    if time.monotonic() - key.data.heard > self._timeout:
                        self._lose(key.data.process, f"has been silent for {self._timeout:g} s: stopped, or cut off")
                        selector.unregister(key.fileobj)
                self._look_for_the_stuck(time.monotonic())

    def _progress(self) -> Progress:
        waiting = self._since is not None and bool(self._running.unfinished())
        return Progress(self._begun, self._ended, waiting, self._left)

    def _hear(self, peer: Peer) -> bool:
        """Reads what a peer sent; returns whether more is to come."""
        said = peer.hear()
        if said is None:
            if not (self._left and peer.progress.left):  # a process waits in the block's end for the others
                self._lose(peer.process, "was killed or crashed: its connection closed without a word")
            return False
        for word, rest in said:
            if word == LOST:
                process, _, reason = rest.partition(" ")
                self._lose(int(process), reason, tell=False)  # also if it is this one
            elif word == FAILED:
                if not (self._failed and rest.startswith("PeerFailureError")):  # which is a consequence
                    self._lose(peer.process, f"left with an error: {rest}")
                return False
        with self._changed:
            self._changed.notify_all()
        return True

    def _look_for_the_stuck(self, now: float) -> None:
        """Loses processes for which this one has waited too long."""
        since = self._since
        if since is None or self._failed:
            return
        late = self._deadline is not None and now - since > self._deadline
        for peer in self._peers:
            at = peer.progress
            if self._left:
                if late and not at.left:
                    self._lose(peer.process, f"has not left the block {self._deadline:g} s after this process: stuck")
            elif at.begun >= self._begun:
                continue
            elif at.left and now - max(since, peer.since) > self._timeout:
                self._lose(
                    peer.process,
                    f"left the block after run {at.ended}, and process {jax.process_index()} has been in run "
                    f"{self._begun} for {now - since:.0f} s",
                )
            elif late:
                self._lose(
                    peer.process,
                    f"is stuck: it has not begun run {self._begun}, in which process {jax.process_index()} has been "
                    f"for {self._deadline:g} s",
                )
        # Marks read another clock.
        entered = [time.perf_counter() - start for _, _, start in self._running.unfinished()]
        if self._left or self._failed or self._deadline is None or max(entered, default=0) <= self._deadline:
            return
        reason = f"process {jax.process_index()} has been in a collective for {self._deadline:g} s"
        for peer in self._peers:
            if peer.progress.begun == self._begun > peer.progress.ended and not peer.progress.waiting:
                self._lose(peer.process, f"is stuck in run {self._begun}, outside of collectives, while {reason}")
        if not self._failed:
            self._lose(None, f"{reason}, and no other is stuck outside of one: they wait for one another in several")

    def _lose(self, process: int | None, reason: str, *, tell: bool = True) -> None:
        """Takes a process for lost, and tells the others unless they told; None: no process in particular."""
        with self._changed:
            if process is None:
                self._wrong = reason
            elif process in self._lost:
                return
            else:
                self._lost[process] = reason
            self._exit_without_shutdown()
            self._changed.notify_all()
            # At once: without process 0, which coordinates jax.distributed, JAX aborts this process within moments.
            _logger.error("%s", self._failure())
        for peer in self._peers if tell and process is not None else ():
            peer.say(LOST, f"{process} {reason}")

    # --- the end of the block ---

    def leave(self) -> None:
        """Waits until all processes have come to the end of the block; raises PeerFailureError if one is lost."""
        with self._changed:
            self._since, self._left = time.monotonic(), True
            self._wake.send(b".")
            self._changed.wait_for(lambda: self._failed or all(peer.progress.left for peer in self._peers))
        if self._failed:
            error = self._failure()
            self.abandon(error)
            raise error
        self._stop()
        for peer in self._peers:
            peer.say(AT, self._progress())  # a heartbeat may not have told it yet
            peer.connection.close()

    def abandon(self, error: BaseException) -> None:
        """Tells the others that this process leaves, and why. The connections stay, so that they see when it ends."""
        self._stop()
        self._exit_without_shutdown()
        for peer in self._peers:
            for process, reason in self._lost.items():  # whoever noticed may not have come to say it
                peer.say(LOST, f"{process} {reason}")
            peer.say(FAILED, f"{type(error).__name__}: {error}")

    def _stop(self) -> None:
        self._closing = True
        self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _exit_without_shutdown(self) -> None:
        """Makes the process end before JAX's exit handlers: their shutdown barrier waits for the dead, and then aborts.

        Process 0 ends last, since JAX aborts the others when it is gone. It waits no longer than the timeout.
        """
        _at_exit(self)

    def _exit(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            peer_links.wait_for_ends([peer for peer in self._peers if peer.process not in self._lost], self._timeout)
        os._exit(1)


@functools.cache
def _at_exit(peers: Peers) -> None:
    atexit.register(peers._exit)


@contextlib.contextmanager
def watch_peers(*, timeout: float = 10.0, deadline: float | None = 600.0, host: str | None = None) -> Iterator[Peers]:
    """Watches the other processes of ``jax.distributed`` for the length of a block, which they all enter and leave.

    ``with glass.sharding.watch_peers() as peers: state = peers.run(train_step, state, batch)``

    A process that is killed, leaves the block with an exception or is silent for ``timeout`` seconds raises
    ``PeerFailureError`` in ``run`` of every other, which says what the ranks there wait for: at once, or after the
    timeout. So does, a timeout after it left, one that leaves in good order before the others' last ``run``, and after
    ``deadline`` one that lives, but is stuck. Otherwise the block ends when all processes have come to its end.

    A process that leaves with an exception ends with exit code 1, process 0 after the others (it waits for them for at
    most ``timeout``). If process 0 is killed, which coordinates ``jax.distributed``, JAX itself aborts the others soon
    after: the error is in their logs.

    Args:
      timeout: seconds of silence after which a process counts as lost, and for the processes to find one another at
        first.
      deadline: seconds that a process waits for others: in one collective of ``glass_jax.sharding``, in a ``run`` that
        another one has not begun, or at the end of the block. None: for ever. It has to be longer than whatever one
        process does while the others wait, as writing a checkpoint.
      host: the address of this machine at which the others reach it; by default that of its name.

    Raises:
      PeerFailureError: the processes did not all reach one another; or, at the end of the block, one is lost.
      CollectiveError: the timeout or the deadline is not positive.
    """
    for name, seconds in {"timeout": timeout, "deadline": deadline}.items():
        if seconds is not None and not seconds > 0:
            raise errors.CollectiveError(f"watch_peers: {name}={seconds} must be above 0 seconds")
    peers = Peers(timeout, deadline, host or socket.gethostbyname(socket.gethostname()))
    try:
        yield peers
    except BaseException as error:
        peers.abandon(error)
        raise
    peers.leave()
