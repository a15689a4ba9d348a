"""Kernels whose cores run at the same time give what they are meant to, compactly; test_mutants runs all of them."""

import dataclasses

import jax
import numpy as np
import pytest

from glass_jax import errors
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model import executor
from glass_jax.hw.order import sync
from tests.hw import programs as p
from tests.hw import synced as s


def run(case):
    return np.asarray(jax.jit(lambda *args: executor.run(case.program, args, case.outputs))(*case.args)[-1])


def longer(tiles):
    """A kernel of ``tiles`` rounds in which the cube is ahead of the vector units."""
    case = s.mixed_product(4, buffers=2)

    def stretch(statements):
        new = []
        for stmt in statements:
            if isinstance(stmt, ir.Section):
                new.append(dataclasses.replace(stmt, body=stretch(stmt.body)))
            elif isinstance(stmt, ir.For) and stmt.var.name in ("t", "s"):
                new.append(dataclasses.replace(stmt, extent=p.const(tiles)))
            else:
                new.append(stmt)
        return tuple(new)

    buffers = dict(case.program.buffers)
    for name in ("x", "y"):
        buffers[name] = dataclasses.replace(buffers[name], shape=(2 * tiles * s.TILE, buffers[name].shape[1]))
    program = dataclasses.replace(case.program, body=stretch(case.program.body), buffers=buffers)
    x = np.random.default_rng(0).standard_normal(buffers["x"].shape).astype(np.float16)
    expected = 2 * x.astype(np.float64) @ case.args[1].astype(np.float64).T
    return dataclasses.replace(case, program=program, args=(x, case.args[1]), expected=expected)


def test_the_cube_may_be_ahead():
    case = longer(6)
    np.testing.assert_allclose(run(case), case.expected, rtol=1e-4, atol=1e-3)


def test_the_traced_program_does_not_grow_with_the_tiles():
    def equations(case):
        jaxpr = jax.make_jaxpr(lambda *args: executor.run(case.program, args, case.outputs))(*case.args)
        return str(jaxpr).count("=")

    assert equations(longer(24)) == equations(longer(12))


def test_units_that_take_turns():
    """Vector unit 1 waits for unit 0: the two are not one thread."""
    x, y = p.buffer("x", s.GM, (2, 64), "float32"), p.buffer("y", s.GM, (2, 64), "float32")
    through, u = p.buffer("through", s.GM, (64,), "float32"), p.buffer("u", s.UB, (64,), "float32")
    c = p.buffer("c", s.L0C, (16, 16), "float32")

    def first_or_second(then, orelse):
        return ir.If(p.op("eq", "sid", 0), tuple(then), tuple(orelse))

    # Unit 0 gives its row to unit 1 through GM; the cube passes the flag on.
    give = [
        p.copy(p.region(x, 0, 0, extents=(1, 64)), p.region(u)),
        p.copy(p.region(u), p.region(through)),
        s.cross_set(4, "MTE3", 3),
    ]
    take = [
        s.cross_wait(4, "MTE2", 5),
        p.copy(p.region(through), p.region(u)),
        p.copy(p.region(u), p.region(y, 1, 0, extents=(1, 64))),
    ]
    vector = ir.Section("vector", (first_or_second(give, take),))
    cube = ir.Section("cube", (s.cross_wait(4, "S", 3), s.cross_set(4, "S", 5 + 16)))
    body = (cube, vector)
    program = p.program([x, through, y], [u, c], *body, units=2, unit="sid")
    data = np.arange(128, dtype=np.float32).reshape(2, 64)
    out = np.asarray(executor.run(program, (data,), (1, 2))[1])
    np.testing.assert_array_equal(out[1], data[0])


def test_blocks_keep_what_they_have_on_chip_while_they_wait_for_all_cores():
    case = s.exchange(blocks=5, rounds=3)
    np.testing.assert_array_equal(run(case), case.expected)
    x, y = (p.buffer(n, s.GM, (4, 64), "float32") for n in "xy")
    u = p.buffer("u", s.UB, (64,), "float32")
    row = [p.region(b, "bx", 0, extents=(1, 64)) for b in (x, y)]
    meet = s.cross_set(0, "MTE3", 1), s.cross_wait(0, "MTE2", 1)
    program = p.program([x, y], [u], p.copy(row[0], p.region(u)), *meet, p.copy(p.region(u), row[1]), blocks=4)
    data = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(executor.run(program, (data,), (1,))[0]), data)


def test_a_block_does_not_see_what_the_block_before_it_left_on_chip():
    """Block 0 fills the buffer, block 1 does not."""
    y, u = p.buffer("y", s.GM, (2, 64), "float32"), p.buffer("u", s.UB, (64,), "float32")
    fill = ir.If(p.op("eq", "bx", 0), (ir.Fill(p.region(u), p.const(1.0, "float32")),))
    section = ir.Section("vector", (fill, p.copy(p.region(u), p.region(y, "bx", 0, extents=(1, 64)))))
    out = np.asarray(executor.run(p.program([y], [u], section, blocks=2), (), (0,))[0])
    assert (out[0] == 1).all() and np.isnan(out[1]).all()


def as_the_data_say(case):
    """``case`` with as many tiles as an array says that it is given first."""
    count = p.buffer("n", s.GM, (1,), "int32")

    def change(statements):
        new = []
        for stmt in statements:
            if isinstance(stmt, ir.Section):
                stmt = dataclasses.replace(stmt, body=change(stmt.body))
            elif isinstance(stmt, ir.For) and stmt.var.name in ("t", "s"):
                stmt = dataclasses.replace(stmt, extent=p.load(count, 0))
            new.append(stmt)
        return tuple(new)

    buffers = case.program.buffers | {"n": count}
    body = change(case.program.body)
    return dataclasses.replace(case.program, params=("n", *case.program.params), buffers=buffers, body=body)


@pytest.mark.parametrize("case", [s.mixed_product(4, buffers=2), s.mixed_product(2)], ids=lambda case: case.name)
def test_synchronization_may_depend_on_data(case):
    program = as_the_data_say(case)
    run = jax.jit(lambda *args: executor.run(program, args, (3,))[0])
    for tiles in (2, 1, 0):
        out, done = np.asarray(run(np.array([tiles], np.int32), *case.args)), 2 * s.TILE * tiles
        np.testing.assert_allclose(out[:done], case.expected[:done], rtol=1e-4, atol=1e-4)
        assert np.isnan(out[done:]).all()


def test_branches_and_while_loops_that_depend_on_data():
    """The vector units wait only if they are told; both count to n, in a while loop."""
    n, y = p.buffer("n", s.GM, (2,), "int32"), p.buffer("y", s.GM, (2, 64), "float32")
    u, c = p.buffer("u", s.UB, (64,), "float32"), p.buffer("c", s.L0C, (16, 16), "float32")
    i, j = (p.buffer(name, ir.Space.SCALAR, (1,), "int32") for name in "ij")

    def counting(counter, *body):
        step = p.store(counter, (0,), p.op("add", p.load(counter, 0), 1))
        loop = ir.While(p.op("lt", p.load(counter, 0), p.load(n, 0)), (*body, step))
        return p.store(counter, (0,), p.const(0)), loop

    told = p.op("ne", p.load(n, 1), 0)
    cube = counting(i, ir.If(told, (s.cross_set(2, "S", 1),)))
    wait = ir.If(told, (s.cross_wait(2, "V", 1),), (s.cross_wait(2, "V", 2),))
    row = p.region(y, "sid", 0, extents=(1, 64))
    vector = (*counting(j, wait), ir.Fill(p.region(u), p.const(3.0, "float32")), p.copy(p.region(u), row))
    sections = ir.Section("cube", cube), ir.Section("vector", vector)
    program = p.program([n, y], [u, c, i, j], *sections, units=2, unit="sid")

    def run(*numbers):
        return np.asarray(executor.run(program, (np.array(numbers, np.int32),), (1,))[0])

    assert (run(3, 1) == 3).all() and (run(0, 0) == 3).all()
    assert np.isnan(run(1, 0)).all()  # flag 2 is never set: the kernel never ends


def test_a_value_that_changes_is_not_carried_over_a_flag():
    y, n = p.buffer("y", s.GM, (64,), "float32"), p.buffer("n", ir.Space.SCALAR, (1,), "int32")
    u = p.buffer("u", s.UB, (64,), "float32")
    body = (
        p.store(n, (0,), p.const(1)), ir.Let(p.var("old"), p.load(n, 0), "k.py:2"), s.cross_set(1, "V", 1),
        s.cross_wait(1, "V", 1), p.store(n, (0,), p.const(2)), p.store(u, ("old",), p.const(1.0, "float32")),
    )  # fmt: skip
    program = p.program([y], [u, n], ir.Section("vector", body))
    with pytest.raises(errors.UnsupportedError, match="k.py:2"):
        executor.run(program, (), (0,))


def test_concurrent_kernels_are_told_from_others():
    assert sync.is_concurrent(s.mixed_product().program)
    assert sync.is_concurrent(s.exchange().program)
    assert not sync.is_concurrent(s.vector_flags(2).program)
    assert not sync.is_concurrent(s.scheduled_product().program)
