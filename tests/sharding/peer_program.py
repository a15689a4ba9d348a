"""A process of a job whose process ``victim`` dies in the middle of a loop of all-reduces; see test_peers.py."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glass_jax import errors
from glass_jax.sharding import collectives, peers

TIMEOUT = 6.0


def main(process: int, processes: int, port: int, victim: int, how: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = jax.make_mesh((processes,), ("x",), axis_types=(AxisType.Auto,))
    whole = np.ones(processes * 4, np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), lambda index: whole[index])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def step(x):
        return collectives.all_reduce(x, "x", algorithm="ring") / processes

    with peers.watch_peers(timeout=TIMEOUT, host="127.0.0.1") as others:
        x = others.run(step, x)
        assert all((shard.data == 1).all() for shard in x.addressable_shards)
        start = time.monotonic()
        try:
            if process == victim:
                leave(how)
            while True:
                x = others.run(step, x)
        except errors.PeerFailureError as error:
            print(
                f"{time.monotonic() - start:.2f} {error.dead} {[wait.rank for wait in error.waits]} {error}", flush=True
            )
            raise


def leave(how: str) -> None:
    time.sleep(0.5)
    if how == "raise":
        raise ValueError("a bad batch")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5])
