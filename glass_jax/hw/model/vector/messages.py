"""What a kernel says to the host: prints and failed assertions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax.errors import DeviceAssertionError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import expressions
from glass_jax.hw.model.evaluation.machine import Machine


def run_print(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Prints texts and values on the host; of lanes that all print, their values together."""
    values = [jnp.squeeze(jnp.asarray(expressions.value(machine, value))) for value in op.args]
    jax.debug.callback(lambda *values: print(*op.attrs["texts"], *values, flush=True), *values)


def run_assert(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Checks a condition in every lane.

    Where it does not hold, the host raises a DeviceAssertionError, which JAX reports as the error of the computation.
    """
    holds = jnp.asarray(expressions.value(machine, op.args[0])) != 0
    if machine.mask is not None:
        holds = holds | ~machine.mask
    said = f": {op.attrs['message']}" if op.attrs["message"] else ""
    message = f"{op.loc or 'a kernel'}: device assertion of {machine.program.name!r} failed{said}"
    block = machine.variables[machine.program.block.name].traced()

    def check(holds: np.ndarray, block: np.ndarray) -> None:
        if not np.all(holds):
            raise DeviceAssertionError(f"{message} (block {int(block)}, {int(np.sum(~holds))} of {holds.size} lanes)")

    jax.debug.callback(check, holds, jnp.asarray(block))
