"""Random numbers: the generator Philox 4x32-10, one stream a thread.

J. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC11. The key is the seed; the counter's high half
is the sequence number, its low half counts blocks of four words, from the offset divided by four, rounded up. That is
how TileLang seeds it, and the words are the hardware's bit for bit. Uniform and normal numbers are made of words in
float32 as TileLang's device code does, so they agree but for the accuracy of logarithm, sine and cosine.

In a parallel loop, which thread runs an iteration is the compiler's choice. The model takes iteration i to be thread
i modulo the number of threads: our assumption.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glass_jax.errors import UnsupportedError
from glass_jax.hw.ir import program as ir
from glass_jax.hw.model.evaluation import elements, expressions
from glass_jax.hw.model.evaluation.machine import Machine
from glass_jax.hw.model.values.symbolic import Linear

_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 10

# Words of a thread's state.
_KEY, _COUNTER, _DRAWN, _NORMAL, _HAS_NORMAL = slice(0, 2), slice(2, 6), 6, 7, 8
STATE_WORDS = 9

_STEP = np.float32(2.3283064e-10)  # 2**-32


def run_init(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Seeds the generator of every thread."""
    state, *exprs = op.args
    seed, sequence, offset = (expressions.value(machine, expr) for expr in exprs)
    lanes = machine.lanes
    zero = jnp.zeros((), jnp.uint32)
    blocks = (jnp.asarray(offset).astype(jnp.uint32) + np.uint32(3)) // np.uint32(4)
    words = [*_halves(seed), blocks, zero, *_halves(sequence), zero, zero, zero]
    _write(machine, state, jnp.stack([jnp.broadcast_to(word, lanes) for word in words], axis=-1))


def run_random(machine: Machine, op: ir.Op, live: frozenset[str]) -> None:
    """Draws a number in every lane into the scalar variable that the operation names."""
    state, result = op.args
    threads = machine.threads
    if threads is None:
        raise UnsupportedError("the NPU model draws random numbers only in a SIMT region")
    count = math.prod(threads.extents.values())
    lanes = machine.lanes[1:]
    numbers = machine.memory.get(state).reshape(machine.lanes[0], count, STATE_WORDS)
    if lanes == tuple(threads.extents.values()):
        numbers, drawn = _draw(numbers, op.attrs["kind"])
        drawn = drawn.reshape(machine.lanes)
    elif lanes and machine.mask is None:
        rounds = math.ceil(math.prod(lanes) / count)
        numbers, drawn = lax.scan(lambda states, _: _draw(states, op.attrs["kind"]), numbers, None, rounds)
        drawn = drawn.transpose(1, 0, 2).reshape(machine.lanes[0], -1)[:, : math.prod(lanes)].reshape(machine.lanes)
    else:
        raise UnsupportedError("the NPU model does not draw random numbers under a condition inside a parallel loop")
    _write(machine, state, numbers)
    elements.store(machine, result, (Linear(0),), drawn)


def _write(machine: Machine, state: str, words: jax.Array) -> None:
    """The state of every thread, where it executes the statement."""
    old = machine.memory.get(state)
    words = words.reshape(old.shape)
    if machine.mask is not None:
        words = jnp.where(machine.mask[..., None], words, old)
    machine.memory.put(state, words)


def _halves(value: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Low and high 32 bits of an integer as the generator takes it, of 64 bits with its sign."""
    value = jnp.asarray(value)
    if value.dtype.itemsize == 8:
        return value.astype(jnp.uint32), (value >> 32).astype(jnp.uint32)
    signed = jnp.issubdtype(value.dtype, jnp.signedinteger)
    high = jnp.where(value < 0, np.uint32(0xFFFFFFFF), np.uint32(0)) if signed else jnp.zeros_like(value, jnp.uint32)
    return value.astype(jnp.uint32), high


def _draw(states: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """The states after a draw, and the numbers; one a thread. ``kind``: ``"bits"``, ``"uniform"`` or ``"normal"``."""
    if kind == "bits":
        return _word(states)
    if kind == "uniform":
        states, word = _word(states)
        return states, _uniform(word)
    after, first = _word(states)
    after, second = _word(after)
    radius = jnp.sqrt(np.float32(-2) * jnp.log(jnp.maximum(_uniform(first), np.float32(1e-7))))
    angle = np.float32(2 * np.float32(np.pi)) * _uniform(second)
    kept = lax.bitcast_convert_type(jnp.sin(angle) * radius, jnp.uint32)
    after = after.at[..., _NORMAL].set(kept).at[..., _HAS_NORMAL].set(np.uint32(1))
    has = states[..., _HAS_NORMAL] != 0
    number = jnp.where(has, lax.bitcast_convert_type(states[..., _NORMAL], jnp.float32), jnp.cos(angle) * radius)
    return jnp.where(has[..., None], states.at[..., _HAS_NORMAL].set(np.uint32(0)), after), number


def _uniform(word: jax.Array) -> jax.Array:
    return word.astype(jnp.float32) * _STEP + _STEP / np.float32(2)


def _word(states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The states after a draw, and the next word of each stream."""
    drawn = states[..., _DRAWN]
    counter = [states[..., 2 + word] for word in range(4)]
    low = counter[0] + drawn // np.uint32(4)
    carry = (low < counter[0]).astype(jnp.uint32)
    middle = counter[1] + carry
    upper = counter[2] + (middle < carry).astype(jnp.uint32)
    block = philox((states[..., 0], states[..., 1]), (low, middle, upper, counter[3]))
    word = jnp.take_along_axis(jnp.stack(block, axis=-1), (drawn % np.uint32(4))[..., None].astype(jnp.int32), axis=-1)
    return states.at[..., _DRAWN].add(np.uint32(1)), word[..., 0]


def philox(key: tuple[jax.Array, ...], counter: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The block of four words of Philox 4x32-10 for a key of two words and a counter of four, uint32."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], x0)
        high1, low1 = _product(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return x0, x1, x2, x3


def _product(a: np.uint32, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The high and the low half of a product of 32-bit words, by its 16-bit parts."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    a_low, a_high = a & mask, a >> half
    b_low, b_high = b & mask, b >> half
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    cross = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (cross >> half), a * b
