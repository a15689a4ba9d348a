"""Finds in a kernel what the hardware would reject or silently get wrong, before there is hardware.

The kernel compiler checks little of this: it emits code for buffers that do not fit. The rules are in
``glass_jax.hw.rules``; each says what the hardware does. They report what is certain: an extent known only at run time
is not judged.
"""

from __future__ import annotations

from collections.abc import Sequence

from glass_jax import errors
from glass_jax.hw import memory as mem
from glass_jax.hw.chips import Chip
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation
from glass_jax.hw.rules import bounds, copies, cube, names, sync
from glass_jax.hw.rules import memory as memory_rules
from glass_jax.hw.rules.base import Rule, Subject, Violation

RULES: tuple[Rule, ...] = (*memory_rules.RULES, *bounds.RULES, *cube.RULES, *copies.RULES, *names.RULES, *sync.RULES)
_OVERFLOWS = ("memory-overflow", "l0-overflow")


def verify(
    program: ir.Program,
    chip: Chip,
    memory: Sequence[Allocation] | None = None,
    flags: ir.Program | None = None,
) -> list[Violation]:
    """What ``chip`` cannot take in ``program``.

    Args:
      program: the kernel.
      chip: the chip it is to run on.
      memory: the compiler's memory map; None takes the upper bound of ``glass_jax.hw.memory.allocations``.
      flags: the synchronization in the code that the compiler generated, as a program without the work; None leaves it
        out.

    Returns:
      The violations, by rule in the order of :data:`RULES`; empty if there are none.
    """
    subject = Subject(program, chip, memory_of(program, chip, memory), flags)
    later = verify(program.next, chip) if program.next is not None else []
    return [violation for rule in RULES for violation in rule.violations(subject)] + later


def memory_of(program: ir.Program, chip: Chip, memory: Sequence[Allocation] | None) -> tuple[Allocation, ...]:
    """The memory map that :func:`verify` judges, thread contexts of SIMT regions included."""
    return mem.with_thread_contexts(mem.allocations(program) if memory is None else memory, program, chip)


def check_memory(program: ir.Program, chip: Chip, memory: Sequence[Allocation] | None = None) -> None:
    """Raises unless the buffers of ``program`` fit the memories of ``chip``; the arguments are those of :func:`verify`.

    Raises:
      OutOfOnChipMemoryError: they do not; the message says where, by how much, and shows the memory map.
    """
    found = [violation for violation in verify(program, chip, memory) if violation.rule in _OVERFLOWS]
    if found:
        lines = [f"kernel {program.name} does not fit {chip.name}:", *map(str, found)]
        raise errors.OutOfOnChipMemoryError("\n".join([*lines, mem.memory_map(memory_of(program, chip, memory), chip)]))
