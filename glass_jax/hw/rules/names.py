"""A rule about names: those of a kernel's variables are those of its C++."""

from __future__ import annotations

from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Space
from glass_jax.hw.rules.base import Findings, Rule, Subject

# Keywords and alternative tokens of C++20 that are no keywords of Python.
RESERVED = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl concept const
    const_cast consteval constexpr constinit co_await co_return co_yield decltype default delete do double dynamic_cast
    enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr
    operator or_eq private protected public register reinterpret_cast requires short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true typedef typeid typename union unsigned using virtual
    void volatile wchar_t xor xor_eq
    """.split()  # noqa: SIM905, words are easier to read than a list of strings
)
_MERGED = (Space.L1, Space.UB)  # their buffers are places in one array of the generated code


def _reserved(subject: Subject) -> Findings:
    named = [(stmt.var.name, stmt.loc) for stmt in subject.of(ir.Let | ir.For)]
    named += [(buffer.name, buffer.loc) for buffer in subject.program.buffers.values() if buffer.space not in _MERGED]
    taken = {name for name, _ in named} | set(subject.program.buffers)
    for unique, loc in dict(named).items():
        # Of two with one name a program numbers the second.
        base = unique.rstrip("0123456789").removesuffix("_")
        name = base if base in taken else unique
        if name in RESERVED:
            message = f"the variable {name} keeps its name in the generated code, where C++ has another use for it"
            yield loc, message, f"Call it otherwise, for example {name}_value"


RULES = (Rule("reserved-name", "The compiler of the generated code takes no keyword for a variable.", _reserved),)
