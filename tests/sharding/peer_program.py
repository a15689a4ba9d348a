"""A process of a job whose process ``victim`` dies in the middle of a loop of all-reduces; see test_peers.py."""

import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glass_jax import errors
from glass_jax.sharding import collectives, peers

TIMEOUT, DEADLINE = 6.0, 8.0


def main(process: int, processes: int, port: int, victim: int, how: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = jax.make_mesh((processes,), ("x",), axis_types=(AxisType.Auto,))
    whole = np.ones(processes * 4, np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), lambda index: whole[index])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def step(x):
        return collectives.all_reduce(x, "x", algorithm="ring") / processes

    with peers.watch_peers(timeout=TIMEOUT, deadline=DEADLINE, host="127.0.0.1") as others:
        x = others.run(step, x)
        assert all((shard.data == 1).all() for shard in x.addressable_shards)
        start = time.monotonic()
        try:
            while process != victim and how != "end":
                x = others.run(step, x)
            while process == victim and not all(peer.progress.waiting for peer in others._peers):
                time.sleep(0.1)
            if how == "inside":
                others.run(jax.jit(lambda x: step(jax.pure_callback(wait_for_ever, x, x))), x)
            LEAVE[how](process)
        except errors.PeerFailureError as error:
            print(
                f"{time.monotonic() - start:.2f} {error.dead} {[wait.rank for wait in error.waits]} {error}", flush=True
            )
            raise
        came = time.monotonic()
    print(f"came at {came} and left at {time.monotonic()}")


def fail(_: int) -> None:
    raise ValueError("a bad batch")


def wait_for_ever(*_: object) -> None:
    threading.Event().wait()


LEAVE = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
    "leave": lambda _: None,
    "outside": wait_for_ever,
    "end": lambda process: time.sleep(process * (TIMEOUT + 1) / 2),
}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5])
