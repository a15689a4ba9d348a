"""The operations that a program names, and what runs each."""

from __future__ import annotations

from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation.machine import Handler, Machine
from glass_jax.hw.model.simd import stores
from glass_jax.hw.model.tiles import moves, reductions
from glass_jax.hw.model.vector import atomics, messages, random

# Synchronization, and hints to the scheduler: the model runs statements in the order written.
_WITHOUT_EFFECT = (
    "ascend_cross_core_set_flag",
    "ascend_cross_core_wait_flag",
    "ascend_get_buf",
    "ascend_pipe_barrier",
    "ascend_rls_buf",
    "ascend_set_flag",
    "ascend_set_mmad_direction",
    "ascend_threadfence",
    "ascend_wait_flag",
    "assume",
    "conflict_hint",
    "per_core_task",
    "stage",
    "sync_warp",
    "task",
    "tvm_storage_sync",
)

# Operations that run in every lane; the others work on a whole tile.
IN_LANES = frozenset({"atomic", "random", "random_init", "print", "assert", *_WITHOUT_EFFECT, *stores.OPERATIONS})


def _no_effect(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Nothing to do."""


HANDLERS: dict[str, Handler] = (
    {
        "reduce": reductions.run_reduce,
        "scan": reductions.run_scan,
        "move": moves.run_move,
        "atomic": atomics.run_atomic,
        "random_init": random.run_init,
        "random": random.run_random,
        "print": messages.run_print,
        "assert": messages.run_assert,
    }
    | dict.fromkeys(_WITHOUT_EFFECT, _no_effect)
    | stores.OPERATIONS
)
