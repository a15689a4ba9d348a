"""Rules about synchronization: for each one kernel that breaks it and one that just does not."""

import dataclasses

import pytest

from glass_jax import errors
from glass_jax.hw import chips, verifier
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir.program import Allocation
from glass_jax.hw.model import executor
from glass_jax.hw.order import ordering, pieces
from glass_jax.hw.rules import bounds, sync
from tests.hw import programs as p
from tests.hw import synced as s

CHIP = chips.get("950DT")
X, Y = p.buffer("x", s.GM, (4, 64), "float32"), p.buffer("y", s.GM, (4, 64), "float32")
U, V = p.buffer("u", s.UB, (64,), "float32"), p.buffer("v", s.UB, (64,), "float32")


def row(of, start=0):
    return p.region(of, start, 0, extents=(1, 64))


def copies(*between, after=(), store_from=U, rows=1):
    """Loads and stores ``rows`` rows through one buffer; ``between`` and ``after`` each of the two."""
    load = p.copy(row(X, "t"), p.region(U), "k.py:1")
    store = p.copy(p.region(store_from), row(Y, "t"), "k.py:2")
    return s.manual(p.program([X, Y], [U, V], p.loop("t", rows, load, *between, store, *after)))


def flag(number=0, event="MTE2_MTE3"):
    return s.set_flag(event, number, "k.py:3"), s.wait_flag(event, number, "k.py:4")


def mixed(cube, vector):
    parts = (ir.Section("cube", tuple(cube)), ir.Section("vector", tuple(vector)))
    return s.manual(p.program([], [U, p.buffer("c", s.L0C, (16, 16), "float32")], *parts, units=2, unit="sid"))


def handshake(times, mode=2):
    """The cube sets a flag several times before the vector units look at it."""
    return mixed([p.loop("t", times, s.cross_set(mode, "FIX", 1))], [p.loop("s", times, s.cross_wait(mode, "V", 1))])


def one_core(mode):
    return s.manual(p.program([], [U], s.cross_set(mode, "MTE3", 1), s.cross_wait(mode, "MTE2", 1)))


def all_cores(*ops):
    return p.program([X, Y], [U], *ops, blocks=4)


def unwritten(*first):
    return p.program([X, Y], [U], *first, p.copy(p.region(U), row(Y), "k.py:2"))


def used_later(guard):
    """Reads a buffer, in a loop that fills it afterwards, if ``guard`` holds."""
    store, load = p.copy(p.region(U), row(Y, "t")), p.copy(row(X, "t"), p.region(U))
    return p.program([X, Y], [U], p.loop("t", 4, ir.If(guard, (store,)), load))


def tile(rows, start=0):
    u = p.buffer("u", s.UB, (16, 64), "float32")
    x = p.buffer("x", s.GM, (64, 64), "float32")
    return p.program([x], [u], p.copy(p.region(x, extents=(rows, 64)), p.region(u, start, 0, extents=(rows, 64))))


def elements(count):
    return p.program([X], [U], p.simt(p.parallel({"i": count}, p.store(U, ("i",), p.const(1.0, "float32")))))


def guarded(limit):
    body = ir.If(p.op("lt", "i", limit), (p.store(U, ("i",), p.const(1.0, "float32")),))
    return p.program([X], [U], p.simt(p.parallel({"i": 128}, body)))


ONE = p.const(1)
# rule, program that breaks it, program that just does not
CASES = [
    ("flag-id", copies(*flag(8)), copies(*flag(7))),
    ("flag-id", copies(*flag(p.op("add", "t", 7)), rows=2), copies(*flag(p.op("add", "t", 6)), rows=2)),
    ("flag-id", copies(s.lock("MTE2", 32), s.unlock("MTE2", 32)), copies(s.lock("MTE2", 31), s.unlock("MTE2", 31))),
    ("flag-id", mixed([s.cross_set(2, "FIX", 16)], []), mixed([s.cross_set(2, "FIX", 15)], [])),
    ("flag-id", mixed([s.cross_set(4, "FIX", 32)], []), mixed([s.cross_set(4, "FIX", 31)], [])),
    ("flag-mode", one_core(2), one_core(0)),
    ("flag-mode", one_core(3), one_core(1)),
    ("flag-mode", mixed([s.cross_set(3, "FIX", 1)], []), mixed([s.cross_set(4, "FIX", 1)], [])),
    ("scalar-barrier", copies(s.barrier("S")), copies(s.barrier("ALL"))),
    ("deadlock", copies(flag()[1]), copies(*flag())),
    ("deadlock", copies(*flag(), *flag()[1:]), copies(*flag(), *flag())),
    ("deadlock", copies(s.lock("MTE2", 1), s.lock("MTE3", 1)),
     copies(s.lock("MTE2", 1), s.unlock("MTE2", 1), s.lock("MTE3", 1))),
    ("deadlock", mixed([s.cross_wait(4, "FIX", 1)], []), mixed([s.cross_wait(4, "FIX", 1)], [s.cross_set(4, "V", 1)])),
    ("deadlock", mixed([s.cross_wait(4, "FIX", 17)], [s.cross_set(4, "V", 2)]),
     mixed([s.cross_wait(4, "FIX", 18)], [s.cross_set(4, "V", 2)])),
    ("deadlock", all_cores(s.cross_wait(0, "MTE2", 1)),
     all_cores(s.cross_set(0, "MTE3", 1), s.cross_wait(0, "MTE2", 1))),
    ("deadlock", all_cores(ir.If(p.op("lt", "bx", 3), (s.cross_set(0, "MTE3", 1),)), s.cross_wait(0, "MTE2", 1)),
     all_cores(ir.If(p.op("lt", "bx", 4), (s.cross_set(0, "MTE3", 1),)), s.cross_wait(0, "MTE2", 1))),
    ("flag-unpaired", copies(flag()[0]), copies(*flag())),
    ("flag-unpaired", mixed([s.cross_set(2, "FIX", 1)], []),
     mixed([s.cross_set(2, "FIX", 1)], [s.cross_wait(2, "V", 1)])),
    ("flag-doubled", copies(*flag(), rows=2), copies(*flag(), rows=1)),
    ("flag-doubled", copies(*flag(), rows=2), copies(*flag(), after=flag(0, "MTE3_MTE2"), rows=2)),
    ("flag-count", handshake(16), handshake(15)),
    ("race", copies(), copies(*flag())),
    ("race", copies(*flag(), rows=2), copies(*flag(), after=flag(0, "MTE3_MTE2"), rows=2)),
    ("race", copies(*flag(0, "MTE2_V")), copies(*flag(0, "MTE2_V"), *flag(0, "V_MTE3"))),
    ("race", copies(s.barrier("MTE2")), copies(s.barrier("ALL"))),
    ("unwritten-memory", unwritten(), unwritten(p.copy(row(X), p.region(U)))),
    ("unwritten-memory", unwritten(), unwritten(ir.Fill(p.region(U), p.const(0.0, "float32")))),
    ("unwritten-memory", used_later(p.const(True, "bool")), used_later(p.op("gt", "t", 0))),
    ("unwritten-memory", copies(*flag(), store_from=V), copies(*flag())),
    ("buffer-bounds", tile(17), tile(16)),
    ("buffer-bounds", tile(16, start=1), tile(15, start=1)),
    ("buffer-bounds", elements(65), elements(64)),
    ("buffer-bounds", elements(65), guarded(64)),
]  # fmt: skip


def rules(program, **options):
    return [violation.rule for violation in verifier.verify(program, options.pop("chip", CHIP), **options)]


@pytest.mark.parametrize("rule, bad, good", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_rule(rule, bad, good):
    assert rule in rules(bad)
    assert rule not in rules(good)


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} | {"grid-size", "compiled-sync"} == {
        rule.id for rule in (*sync.RULES, *bounds.RULES)
    }


def test_the_910a_has_four_flags():
    assert "flag-id" in rules(copies(*flag(4)), chip=chips.get("910A"))
    assert "flag-id" not in rules(copies(*flag(3)), chip=chips.get("910A"))


def test_a_race_names_both_lines():
    (violation,) = verifier.verify(copies(), CHIP)[:1]
    assert violation.rule == "race"
    assert {violation.loc, "k.py:1" if violation.loc == "k.py:2" else "k.py:2"} == {"k.py:1", "k.py:2"}
    assert ("k.py:1" in violation.message) != (violation.loc == "k.py:1")


def test_buffers_that_share_room_race():
    """Two buffers at one address: the second is loaded while the first is stored."""
    first, second = p.copy(row(X, 0), p.region(U)), p.copy(row(X, 1), p.region(V))
    order = flag()
    stores = p.copy(p.region(U), row(Y, 0)), p.copy(p.region(V), row(Y, 1))
    program = s.manual(p.program([X, Y], [U, V], first, *order, stores[0], second, *flag(1), stores[1]))
    apart = [Allocation("u", s.UB, 0, 256, 1), Allocation("v", s.UB, 256, 256, 1)]
    shared = [Allocation("u", s.UB, 0, 256, 1), Allocation("v", s.UB, 128, 256, 1)]
    assert rules(program, memory=apart) == []
    assert rules(program, memory=shared) == ["race"]


def test_a_wait_of_the_scalar_unit_holds_up_what_it_issues_later():
    stop = s.set_flag("MTE2_S"), s.wait_flag("MTE2_S")
    assert rules(copies(*stop)) == []


def test_vector_units_have_memories_of_their_own():
    """Unit 0 and unit 1 use one buffer's name without a flag between them."""
    vector = [p.copy(row(X, "sid"), p.region(U)), *flag(), p.copy(p.region(U), row(Y, "sid"))]
    parts = (ir.Section("vector", tuple(vector)),)
    program = s.manual(p.program([X, Y], [U], *parts, units=2, unit="sid"))
    assert rules(program) == []


def test_a_kernel_that_the_compiler_orders_has_no_race():
    assert rules(dataclasses.replace(copies(), manual=False)) == []


def test_flags_that_the_compiler_inserted():
    kernel = dataclasses.replace(copies(), manual=False)
    for bad in (copies(flag()[0]), copies(*flag(), rows=2), copies(*flag(8))):
        assert set(rules(kernel, flags=bad)) == {"compiled-sync"}
    assert rules(kernel, flags=copies(*flag())) == []
    assert rules(copies(*flag()), flags=copies(flag()[0])) == []  # what the author wrote is judged where he wrote it


def test_a_counter_in_memory_numbers_flags():
    """As compiled kernels do it: set and wait for flag counter % 2, then count."""
    counter = p.buffer("n", ir.Space.SCALAR, (1,), "int32")
    number = p.op("floormod", p.load(counter, 0), 2)
    step = p.store(counter, (0,), p.op("add", p.load(counter, 0), 1))

    def program(drained):
        body = [p.store(counter, (0,), p.const(0)), p.loop("t", 3, s.set_flag("MTE2_V", number), step)]
        return s.manual(p.program([], [counter], *body, *(s.wait_flag("MTE2_V", n) for n in drained)))

    assert rules(program([0, 1, 0])) == ["flag-doubled"]
    assert rules(program([0, 1, 1])) == ["deadlock", "flag-doubled"]


def test_what_is_known_only_at_run_time_is_not_judged():
    many = p.op("add", ir.Load("x", (p.ZERO, p.ZERO), "int32"), 1)
    body = p.loop("t", many, p.copy(row(X), p.region(U)), s.set_flag("MTE2_MTE3"), p.copy(p.region(U), row(Y)))
    assert rules(s.manual(p.program([X, Y], [U], body))) == []


def test_deadlock_names_every_waiting_pipe():
    program = mixed(
        [s.cross_wait(4, "FIX", 1, "k.py:5"), s.cross_wait(4, "MTE2", 17, "k.py:6")],
        [s.cross_wait(4, "V", 3, "k.py:7")],
    )
    with pytest.raises(errors.DeadlockError) as caught:
        executor.run(program, (), ())
    waits = caught.value.waits
    assert len(waits) == 4 and caught.value.loc in ("k.py:5", "k.py:6")
    for part in ("cube, pipe FIX", "cube, pipe MTE2", "vector unit 0, pipe V", "vector unit 1, pipe V", "k.py:7"):
        assert any(part in wait for wait in waits)
    with pytest.raises(errors.DeadlockError, match="vector unit 0"):
        pieces.check_order(program, 1)
    assert ordering.check(program).waits == waits
