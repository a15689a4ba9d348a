"""Text generation with a paged cache: prompts of any length share the pages of one cache, and rows of one batch.

A :class:`Generator` has a fixed number of rows, one for each sequence that is being continued, and a cache of pages. A
prompt gets a row and pages as soon as both are free, and gives them back when it is done, so any number of prompts
passes through. Shapes are static: one compilation of the decode step, and one of the prefill for each power of two that
prompts are filled up to.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.deepseek import DeepSeek

_SHORTEST_PREFILL = 16


class PageAllocator:
    """Which pages of a cache are free. Those that came back last are given out first.

    Args:
      pages: numbers of the pages.
    """

    def __init__(self, pages: Iterable[int]):
        self._free = list(pages)[::-1]
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages that nobody else has.

        Raises:
          ValueError: there are not so many.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for and {len(self._free)} are free: wait, or make more pages")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Makes ``pages`` free again.

        Raises:
          ValueError: one of them is not taken.
        """
        for page in pages:
            if page not in self._taken:
                raise ValueError(f"page {page} comes back and was not taken")
            self._taken.remove(page)
            self._free.append(page)


@dataclasses.dataclass
class _Sequence:
    """A prompt and what was drawn after it so far."""

    number: int
    prompt: np.ndarray
    pages: list[int] = dataclasses.field(default_factory=list)
    drawn: list[int] = dataclasses.field(default_factory=list)

    @property
    def stored(self) -> int:
        """Tokens that the cache holds: all but the one drawn last."""
        return len(self.prompt) + len(self.drawn) - 1


class Generator:
    """Continues prompts with a model.

    Args:
      model: the model.
      rows: sequences that are continued at a time.
      max_length: tokens of the longest sequence, prompt and continuation.
      page_size: tokens of a page.
      pages: pages of the cache; None: enough for ``rows`` sequences of ``max_length``.

    On a mesh, each device of the data and expert axes has its rows and pages; both numbers are rounded up.
    """

    def __init__(
        self, model: DeepSeek, *, rows: int = 8, max_length: int = 1024, page_size: int = 64, pages: int | None = None
    ):
        self.max_length, self._page_size = max_length, page_size
        parts = model.axes.size("batch")
        rows_of_part, pages_of_row = _ceil_div(rows, parts), _ceil_div(max_length, page_size)
        pages_of_part = rows_of_part * pages_of_row if pages is None else _ceil_div(pages, parts)
        ranges = [range(part * pages_of_part, (part + 1) * pages_of_part) for part in range(parts)]
        self._allocators = [PageAllocator(pages) for pages in ranges]
        self._rows_of_part, self._pages_of_part = rows_of_part, pages_of_part
        self._vocabulary = model.config.vocab_size
        self._model = nnx.split(model)
        self._cache = model.empty_cache(parts * pages_of_part, page_size)
        self._table = np.zeros((parts * rows_of_part, pages_of_row), np.int32)
        self._rows: list[_Sequence | None] = [None] * len(self._table)

    @property
    def free_pages(self) -> int:
        """How many pages of the cache no sequence has."""
        return sum(allocator.available for allocator in self._allocators)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_id: int | Sequence[int] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        key: jax.Array | None = None,
    ) -> list[list[int]]:
        """Continues each prompt.

        :func:`models.hf_generation.generation_from_hf` has the options that a published model comes with.

        Args:
          prompts: token numbers, at least one in each.
          max_new_tokens: how many to draw at most.
          eos_id: a token that ends a continuation, and is its last, or several of them. None: there is none.
          temperature: what scores are divided by before a token is drawn; 0: the token of the highest score.
          top_p: a token is drawn from as few of the most probable ones as have this share together; more than 0.
          key: random key, if ``temperature`` is not 0. What is drawn depends on it, the prompt's place among the
            prompts and the token's, and not on what else is in the batch.

        Returns:
          The tokens after each prompt.

        Raises:
          ValueError: before anything is computed: a prompt is empty, holds what is no number of a token, or can never
            fit; an option has no meaning.
        """
        if not _is_integer(max_new_tokens) or max_new_tokens < 1:
            raise ValueError(f"{max_new_tokens=} must be an integer, 1 or more")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"{temperature=} must be a number, 0 or more: scores are divided by it")
        if not 0 < top_p <= 1:
            raise ValueError(f"{top_p=} must be more than 0 and at most 1: it is a share of the probability")
        if temperature and key is None:
            raise ValueError(f"{temperature=} draws at random: pass key=jax.random.key(seed)")
        ends = () if eos_id is None else (eos_id,) if _is_integer(eos_id) else eos_id
        ends = set(self._tokens("eos_id", ends).tolist())
        sequences = [_Sequence(i, self._tokens(f"prompt {i}", prompt)) for i, prompt in enumerate(prompts)]
        for sequence in sequences:
            self._check(sequence, max_new_tokens)
        options = {"temperature": float(temperature), "top_p": float(top_p)}
        draw = functools.partial(_draw, key=jax.random.key(0) if key is None else key, **options)
        waiting = collections.deque(sequences)
        try:
            while waiting or any(self._rows):
                if new := self._admit(waiting, max_new_tokens):
                    self._advance(new, self._prefill(new), draw)
                else:
                    rows = [row for row, sequence in enumerate(self._rows) if sequence]
                    self._advance(rows, self._decode(), draw)
                self._release(lambda drawn: len(drawn) == max_new_tokens or drawn[-1] in ends)
        finally:  # an interruption, too, leaves no sequence behind
            self._release(lambda drawn: True)
        return [sequence.drawn for sequence in sequences]

    def _tokens(self, what: str, given: Sequence[int]) -> np.ndarray:
        """``given`` as an array, if each of them is the number of a token."""
        values = np.asarray(given)
        if values.size == 0:
            return np.zeros(0, np.int32)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(
                f"{what} is {values.dtype} of shape {values.shape}, expected numbers of tokens: a row of integers"
            )
        outside = values[(values < 0) | (values >= self._vocabulary)]
        if outside.size:
            raise ValueError(f"{what} holds {outside[0]}, and the model has tokens 0 to {self._vocabulary - 1}")
        return values.astype(np.int32)

    def _check(self, sequence: _Sequence, max_new_tokens: int) -> None:
        number, length = sequence.number, len(sequence.prompt)
        if length == 0:
            raise ValueError(f"prompt {number} is empty: begin it with a token, such as the model's own first one")
        if length + max_new_tokens > self.max_length:
            raise ValueError(
                f"prompt {number} has {length} tokens, {length + max_new_tokens} with {max_new_tokens=}: "
                f"more than max_length={self.max_length}"
            )
        needed, most = self._pages_of(sequence, max_new_tokens), self._pages_of_part
        if needed > most:
            raise ValueError(
                f"prompt {number} needs {needed} pages and a device has {most}: make a Generator with more pages"
            )

    def _pages_of(self, sequence: _Sequence, max_new_tokens: int) -> int:
        """Pages of the longest continuation, the last token of which is never stored."""
        return _ceil_div(len(sequence.prompt) + max_new_tokens - 1, self._page_size)

    def _admit(self, waiting: collections.deque[_Sequence], max_new_tokens: int) -> list[int]:
        """Gives rows and pages to the prompts that wait, in order, as far as there are; the rows."""
        new = []
        for row, occupant in enumerate(self._rows):
            if occupant is not None or not waiting:
                continue
            # The pages of the longest continuation are set aside at once, so that no sequence stops half-way.
            count = self._pages_of(waiting[0], max_new_tokens)
            allocator = self._allocator(row)
            if count <= allocator.available:
                sequence = self._rows[row] = waiting.popleft()
                sequence.pages = allocator.take(count)
                self._table[row] = sequence.pages[0]  # entries past the end name a page of the row's own device
                self._table[row, :count] = sequence.pages
                new.append(row)
        return new

    def _allocator(self, row: int) -> PageAllocator:
        """The pages of the device that has ``row``."""
        return self._allocators[row // self._rows_of_part]

    def _prefill(self, rows: list[int]) -> jax.Array:
        """Reads the prompts of ``rows`` into the cache; scores after each, ``[rows, V]``."""
        lengths = np.zeros(len(self._rows), np.int32)
        for row in rows:
            lengths[row] = len(self._rows[row].prompt)
        width = max(_SHORTEST_PREFILL, 1 << int(lengths.max() - 1).bit_length())
        tokens = np.zeros((len(self._rows), width), np.int32)
        for row in rows:
            tokens[row, : lengths[row]] = self._rows[row].prompt
        scores, self._cache = _prefill_step(*self._model, tokens, lengths, self._cache, self._table)
        return scores

    def _decode(self) -> jax.Array:
        """Reads each sequence's last token into the cache; scores after it, ``[rows, V]``."""
        tokens = np.array([[s.drawn[-1] if s else 0] for s in self._rows], np.int32)
        lengths = np.array([s.stored if s else -1 for s in self._rows], np.int32)
        scores, self._cache = _decode_step(*self._model, tokens, lengths, self._cache, self._table)
        return scores

    def _advance(self, rows: list[int], scores: jax.Array, draw) -> None:
        """Draws the next token of the sequences in ``rows``."""
        numbers = np.array([s.number if s else 0 for s in self._rows], np.uint32)
        places = np.array([len(s.drawn) if s else 0 for s in self._rows], np.uint32)
        drawn = np.asarray(draw(scores, numbers, places))
        for row in rows:
            self._rows[row].drawn.append(int(drawn[row]))

    def _release(self, done: Callable[[list[int]], bool]) -> None:
        """Takes rows and pages back from the sequences that are ``done``, by what they have drawn."""
        for row, sequence in enumerate(self._rows):
            if sequence and done(sequence.drawn):
                self._allocator(row).give_back(sequence.pages)
                self._rows[row] = None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill_step(graphdef, state, tokens, lengths, cache, table):
    return nnx.merge(graphdef, state).prefill(tokens, lengths, cache, table)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _decode_step(graphdef, state, tokens, lengths, cache, table):
    scores, cache = nnx.merge(graphdef, state).decode(tokens, lengths, cache, table)
    return scores[:, 0], cache


@functools.partial(jax.jit, static_argnames=("temperature", "top_p"))
def _draw(
    scores: jax.Array, numbers: jax.Array, places: jax.Array, *, key: jax.Array, temperature: float, top_p: float
) -> jax.Array:
    """A token for each row of ``scores`` ``[rows, V]``, by a key of the sequence and the place of the token in it."""
    if temperature == 0:
        return jnp.argmax(scores, axis=-1)
    scores = scores / temperature
    if top_p < 1:
        scores = _most_probable(scores, top_p)
    keys = jax.vmap(lambda number, place: jax.random.fold_in(jax.random.fold_in(key, number), place))(numbers, places)
    return jax.vmap(jax.random.categorical)(keys, scores)


def _most_probable(scores: jax.Array, share: float) -> jax.Array:
    """``scores`` ``[rows, V]``, -inf but for the fewest of the most probable tokens that have ``share`` together."""
    order = jnp.argsort(scores, axis=-1, descending=True)
    ordered = jax.nn.softmax(jnp.take_along_axis(scores, order, axis=-1), axis=-1)
    kept = jnp.cumsum(ordered, axis=-1) - ordered < share  # what those before it have together is not enough
    place = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, place, axis=-1), scores, -jnp.inf)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
