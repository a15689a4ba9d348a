"""Where the rows of expert parallelism go: computed on the devices, from the choices of the tokens.

A *choice* is a token's choice of an expert, a *row* what the expert's rank computes with for one choice. A token goes
to a rank once, however many of the rank's experts it chose, and becomes one row for each of them there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from glass_jax import errors
from glass_jax.sharding import exchange
from glass_jax.sharding.exchange import Channel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relay:
    """Tokens sent once to each rank that needs them.

    Attributes:
      tokens: int32 ``[P*places]``, the token that goes to each place of each rank; T: none.
      places: int32 ``[T, K]``, the place of a choice's token where the choice goes; ``channel.none``: it goes nowhere.
      first: bool ``[T, K]``, whether a choice is the first of its token that goes to a rank.
      longest: int32 ``[1]``, the most tokens that a rank has for another; of all ranks once they agreed on it.
      channel: the exchange.
    """

    tokens: jax.Array
    places: jax.Array
    first: jax.Array
    longest: jax.Array
    channel: Channel = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, to: jax.Array, channel: Channel) -> Relay:
        """The relay of tokens whose choices go to ranks ``to``, ``[T, K]`` (P: nowhere), as far as there are places."""
        leader = first_equal(to)
        first = (to < channel.ranks) & (leader == jnp.arange(to.shape[1]))
        place, counts = exchange.positions(jnp.where(first, to, channel.ranks).ravel(), channel.ranks)
        place = jnp.take_along_axis(place.reshape(to.shape), leader, axis=1)
        goes = (to < channel.ranks) & (place < channel.places)
        places = jnp.where(goes, to * channel.places + place, channel.none)
        choices = exchange.inverse(jnp.where(first, places, channel.none).ravel(), channel.none)
        tokens = jnp.where(choices < to.size, choices // to.shape[1], to.shape[0])
        return cls(tokens, places, first, jnp.max(counts)[None], channel)

    def send(self, x: jax.Array) -> jax.Array:
        """``x`` ``[T, ...]`` where its tokens are needed: ``[P*places, ...]``, anything in places without a token."""
        return self.channel.spread(x, self.tokens, self.longest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """What a dispatch found out about the tokens of a rank, for the combine and for further dispatches.

    A pytree whose leaves all have a leading dimension of the rank's own, so that ``out_specs=P(axis)`` takes it out of
    a ``shard_map`` and ``in_specs=P(axis)`` into another. E experts, P ranks, C rows of a rank, R places for them.

    Attributes:
      group_sizes: int32 ``[E/P]``, rows of each of the rank's experts.
      group_starts: int32 ``[E/P]``, where each expert's rows begin among the C.
      row_weights: float32 ``[C]``, the gate's weight of each row, 0 where there is none; differentiable.
      dropped: int32 ``[1]``, choices that this rank left out: beyond the capacity, or of an expert that does not exist.
      needed: int32 ``[1]``, the capacity that holds the rows that came to be exchanged; the same on all ranks.
      row_tokens: int32 ``[C]``, the place among those of ``tokens`` that each row's token came to.
      sent_rows: int32 ``[R]``, the row that goes back to each place; C: none.
      choice_places: int32 ``[T*K]``, the place that each choice's row comes back to; R: none.
      choice_weights: float32 ``[T, K]``.
      longest: int32 ``[1]``, the most rows that any rank has for another.
      tokens: the tokens' way to their experts' ranks.
      nodes: of a hierarchical dispatch, the way before that, to the experts' nodes.
      channel: the exchange of rows.
      shape: of ``recv`` without its last dimension.
      capacity: rows that a rank takes, without padding.
      alignment: what ``group_starts`` are multiples of.
    """

    group_sizes: jax.Array
    group_starts: jax.Array
    row_weights: jax.Array
    dropped: jax.Array
    needed: jax.Array
    row_tokens: jax.Array
    sent_rows: jax.Array
    choice_places: jax.Array
    choice_weights: jax.Array
    longest: jax.Array
    tokens: Relay
    nodes: Relay | None
    channel: Channel = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    alignment: int = dataclasses.field(metadata={"static": True})

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, the outer one first."""
        return (self.channel.axis,) if self.nodes is None else (self.nodes.channel.axis, self.channel.axis)

    @property
    def token_count(self) -> int:
        """T, tokens of a rank."""
        return len(self.choice_weights) if self.nodes is None else len(self.nodes.places)

    @property
    def group_ends(self) -> jax.Array:
        """int32 ``[E/P]``, where each expert's rows end, padding not counted: the *psum* layout of grouped products."""
        return self.group_starts + self.group_sizes

    @property
    def padded_group_sizes(self) -> jax.Array:
        """int32 ``[E/P]``, rows of each expert with the padding after them. They lie end to end, unless each expert
        has a buffer of its own.
        """
        return round_up(self.group_sizes, self.alignment)

    def check(self) -> None:
        """Raises unless every choice reached its expert. For the host, outside of ``jit`` and ``shard_map``.

        Raises:
          CollectiveError: choices were dropped; says how many, and the capacity that suffices.
        """
        dropped, needed = int(jnp.sum(self.dropped)), int(jnp.max(self.needed))
        if dropped and needed > self.capacity:
            raise errors.CollectiveError(
                f"moe_dispatch dropped {dropped} choices of experts: capacity={self.capacity} rows a rank is too "
                f"little for this routing. capacity={needed} or more would do, capacity=None takes any routing"
            )
        if dropped:
            raise errors.CollectiveError(
                f"moe_dispatch dropped {dropped} choices of experts that do not exist: entries of topk_idx must be -1 "
                "or in 0 .. num_experts - 1"
            )


@dataclasses.dataclass(frozen=True)
class Limits:
    """Static sizes of a dispatch.

    Attributes:
      experts: experts of all ranks of the axis.
      capacity: rows that a rank takes, without padding.
      alignment: each expert's rows begin at a multiple of it.
      buffer: rows of each expert's own buffer, or None: the experts' rows follow each other.
      mean: rows that are expected between two ranks.
    """

    experts: int
    capacity: int
    alignment: int
    buffer: int | None
    mean: float

    def shape(self, experts: int) -> tuple[int, ...]:
        """Rows of a rank with so many experts."""
        if self.buffer is not None:
            return (experts, self.buffer)
        return (round_up(self.capacity + experts * (self.alignment - 1), self.alignment),)

    def starts(self, sizes: jax.Array) -> jax.Array:
        """Where groups of ``sizes`` rows begin."""
        if self.buffer is not None:
            return jnp.arange(sizes.size, dtype=jnp.int32) * self.buffer
        return exchange.before_each(round_up(sizes, self.alignment))


def layout(idx: jax.Array, weights: jax.Array, axis: str, limits: Limits, nodes: Relay | None = None) -> Handle:
    """Exchanges what the ranks of ``axis`` have to know before tokens travel.

    Args:
      idx: int32 ``[T, K]``, different experts of ``0 .. limits.experts - 1`` for each token; -1: none.
      weights: float32 ``[T, K]``.
      axis: name of the axis.
      limits: static sizes.
      nodes: the way that tokens came before, over an outer axis. Rows of an expert are in order of the outer axis' rank
        that they come from, then of this axis' rank, then of the token.

    Returns:
      The handle.
    """
    ranks, segments = lax.axis_size(axis), nodes.channel.ranks if nodes else 1
    local = limits.experts // ranks
    most = idx.shape[0] * min(idx.shape[1], local)
    quota = min(limits.capacity // ranks, most)
    channel = Channel.create(axis, ranks, quota, limits.mean)

    to = jnp.where(idx >= 0, idx // local, ranks)
    before, wanted = exchange.positions(to.ravel(), ranks)
    if quota < most:  # where it binds, the tokens that come last lose
        kept = before.reshape(idx.shape) < quota
        idx, to = jnp.where(kept, idx, -1), jnp.where(kept, to, ranks)
    tokens = Relay.create(to, Channel.create(axis, ranks, min(idx.shape[0], quota), limits.mean))

    # A bin is an expert and a segment, the tokens of one rank of the outer axis. What a rank sends to another is in
    # order of the bin, then of the token.
    bins = local * segments
    segment = jnp.arange(idx.shape[0], dtype=jnp.int32)[:, None] // max(idx.shape[0] // segments, 1)
    bin_of = jnp.where(idx >= 0, idx * segments + segment, ranks * bins).ravel()
    in_bin, counts = exchange.positions(bin_of, ranks * bins)
    counts = counts.reshape(ranks, bins)
    place = exchange.take(exchange.before_each(counts, axis=1).ravel(), bin_of) + in_bin
    choice_places = jnp.where(to.ravel() < ranks, to.ravel() * channel.places + place, channel.none)

    choices = exchange.inverse(choice_places, channel.none)
    token_place = (tokens.places % tokens.channel.places).ravel()
    message = jnp.stack([exchange.take(each, choices) for each in (bin_of % bins, token_place)], axis=1)
    message = jnp.concatenate([counts, message.reshape(ranks, -1)], axis=1)
    came = channel.exchange(message)
    sizes, starts, rows = _arrange(came[:, :bins], came[:, bins::2], limits, segments)
    shape = limits.shape(local)
    arrivals = exchange.inverse(rows, math.prod(shape))
    sources = jnp.arange(ranks)[:, None] * tokens.channel.places + came[:, bins + 1 :: 2]

    longest = [jnp.max(wanted), jnp.max(counts.sum(axis=1)), tokens.longest[0], nodes.longest[0] if nodes else 0]
    # All ranks agree in one message, those of other nodes too, so that all loops of one exchange end together.
    longest = lax.pmax(jnp.stack(longest), (nodes.channel.axis, axis) if nodes else axis)
    needed, rows_longest, tokens_longest, nodes_longest = jnp.split(longest, 4)
    return Handle(
        group_sizes=sizes,
        group_starts=starts,
        row_weights=exchange.take(channel.exchange(exchange.take(weights.ravel(), choices)), arrivals),
        dropped=jnp.maximum(wanted - quota, 0).sum(keepdims=True),
        needed=jnp.maximum(needed * ranks, nodes_longest * segments),
        row_tokens=exchange.take(sources.ravel(), arrivals, fill=tokens.channel.none),
        sent_rows=rows,
        choice_places=choice_places,
        choice_weights=weights,
        longest=rows_longest,
        tokens=dataclasses.replace(tokens, longest=tokens_longest),
        nodes=nodes and dataclasses.replace(nodes, longest=nodes_longest),
        channel=channel,
        shape=shape,
        capacity=limits.capacity,
        alignment=limits.alignment,
    )


def _arrange(
    counts: jax.Array, bins: jax.Array, limits: Limits, segments: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Orders the rows that come to a rank by expert, segment, rank and token.

    Args:
      counts: int32 ``[P, E/P*segments]``, rows that come from each rank in each bin.
      bins: int32 ``[P, R/P]``, the bin of the row in each place; anything in places beyond the last.
      limits: static sizes.
      segments: of the tokens of each rank.

    Returns:
      int32 ``[E/P]`` sizes of the groups, ``[E/P]`` their starts, ``[R]`` the row of each place; C: none.
    """
    ranks, places = bins.shape
    by_group = counts.reshape(ranks, -1, segments).transpose(1, 2, 0)
    sizes = by_group.sum(axis=(1, 2))
    starts = limits.starts(sizes)
    offsets = exchange.before_each(by_group.reshape(len(sizes), -1), axis=1).reshape(by_group.shape)
    begins = (starts[:, None, None] + offsets).transpose(2, 0, 1).reshape(counts.shape)
    place = jnp.arange(places)
    rows = jnp.take_along_axis(begins - exchange.before_each(counts, axis=1), bins, axis=1) + place
    rows = jnp.where(place < counts.sum(axis=1, keepdims=True), rows, math.prod(limits.shape(len(sizes))))
    return sizes, starts, rows.ravel().astype(jnp.int32)


def merge_equal(idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choices ``[T, K]`` with each expert once in a token: the first takes the sum of the weights, the others go."""
    first = first_equal(idx)
    fresh = (idx >= 0) & (first == jnp.arange(idx.shape[1]))
    shared = [jnp.where(first == first[:, k, None], weights[:, k, None], 0) for k in range(idx.shape[1])]
    return jnp.where(fresh, idx, -1), jnp.where(fresh, sum(shared), 0)


def first_equal(x: jax.Array) -> jax.Array:
    """For each entry of ``x`` ``[T, K]``, the first position in its row with the same value: int32 ``[T, K]``."""
    return jnp.argmax(x[:, :, None] == x[:, None, :], axis=2).astype(jnp.int32)


def round_up(x: Any, multiple: int) -> Any:
    """The smallest multiple of ``multiple`` that is not less than ``x``."""
    return -(-x // multiple) * multiple
