"""Redundant experts: which experts to have more than once and where, and which copy a token takes.

The placement is the published one of DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB): greedy,
and deterministic. It runs on the host, with NumPy, now and then, on the loads that were counted;
:func:`choose_replicas` runs on the devices for every batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from glass_jax import errors
from glass_jax.sharding import checks, exchange


def rebalance_experts(
    weight: ArrayLike, replicas: int, groups: int, nodes: int, devices: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places ``replicas`` physical experts on devices, the busiest logical experts several times.

    If the groups divide evenly among the nodes, each group's experts stay on one node (a gate that is limited to few
    groups then sends to few nodes): groups are packed on nodes, experts replicated within each node, and the copies
    packed on its devices. Otherwise groups and nodes are ignored. To pack is to put the heaviest that is left on the
    lightest place that is not full; to replicate, to give a copy more to the expert with the largest load a copy.

    Args:
      weight: ``[L, E]``, the load of each of E experts in L layers.
      replicas: physical experts of a layer, R, at least E.
      groups: groups that the gate chooses experts by; they are of equal size and lie one after another.
      nodes: nodes of equally many devices.
      devices: all devices; each gets ``R / devices`` physical experts, one after another.

    Returns:
      physical_to_logical: int32 ``[L, R]``, the expert that each physical expert is a copy of.
      logical_to_physical: int32 ``[L, E, most copies]``, the copies of each expert, filled up with -1.
      counts: int32 ``[L, E]``, how many copies each expert has.

    Raises:
      CollectiveError: the numbers do not divide as described, or a weight is negative or not finite. Groups and nodes
        that are ignored need not divide anything.
    """
    weight, groups, nodes = _checked(weight, replicas, groups, nodes, devices)
    placed = [_place(layer, replicas, groups, nodes, devices) for layer in weight]
    physical_to_logical, copies = np.array(placed, np.int32).reshape(-1, 2, replicas).swapaxes(0, 1)
    layers = np.arange(len(weight))[:, None]
    counts = np.zeros(weight.shape, np.int32)
    np.add.at(counts, (layers, physical_to_logical), 1)
    logical_to_physical = np.full((*weight.shape, counts.max(initial=0)), -1, np.int32)
    logical_to_physical[layers, physical_to_logical, copies] = np.arange(replicas)
    return physical_to_logical, logical_to_physical, counts


def choose_replicas(
    topk_idx: jax.Array, logical_to_physical: ArrayLike, counts: ArrayLike, *, axis_name: str | tuple[str, str]
) -> jax.Array:
    """The copies that tokens take: ``topk_idx`` for a :func:`moe_dispatch` with ``num_experts`` physical experts.

    The choices of an expert on a rank take its copies in turn, beginning with a copy that depends on the rank: on each
    rank, the loads of an expert's copies differ by at most one. The same choices take the same copies always.

    Args:
      topk_idx: integers ``[T, K]``, logical experts; -1: none.
      logical_to_physical: ``[E, most copies]``, of one layer, from :func:`rebalance_experts`.
      counts: ``[E]``, of the same layer.
      axis_name: the mesh axis, or two, as for the dispatch.

    Returns:
      int32 ``[T, K]``, physical experts. What is no expert's number stays as it is if negative, and becomes a number
      that no physical expert has otherwise, so that the dispatch counts it.
    """
    table, counts = jnp.asarray(logical_to_physical, jnp.int32), jnp.asarray(counts, jnp.int32)
    expert = topk_idx.astype(jnp.int32).ravel()
    exists = (expert >= 0) & (expert < len(counts))
    turn, _ = exchange.positions(jnp.where(exists, expert, len(counts)), len(counts))
    known = jnp.where(exists, expert, 0)
    copy = (turn + lax.axis_index(axis_name)) % counts[known]
    unknown = jnp.where(expert < 0, expert, jnp.iinfo(jnp.int32).max)
    return jnp.where(exists, table[known, copy], unknown).reshape(topk_idx.shape)


def _place(weight: np.ndarray, replicas: int, groups: int, nodes: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a layer with loads ``[E]``: the expert of each physical expert ``[R]``, and which copy it is ``[R]``."""
    members = np.arange(len(weight)).reshape(groups, -1)
    experts, copies = [], []
    for packed in _pack(weight[members].sum(axis=1), nodes):
        on_node = members[packed].ravel()
        copied, copy = _replicate(weight[on_node], replicas // nodes)
        counts = np.bincount(copied, minlength=len(on_node))
        order = _pack((weight[on_node] / counts)[copied], devices // nodes).ravel()
        experts.append(on_node[copied[order]])
        copies.append(copy[order])
    return np.concatenate(experts), np.concatenate(copies)


def _pack(weight: np.ndarray, packs: int) -> np.ndarray:
    """Packs things of ``weight`` ``[n]`` so that the packs weigh about the same: indices ``[packs, n / packs]``."""
    size = len(weight) // packs
    if size == 1:
        return np.arange(len(weight))[:, None]
    content: list[list[int]] = [[] for _ in range(packs)]
    load = np.zeros(packs)
    for thing in np.argsort(-weight, kind="stable"):
        pack = min((p for p in range(packs) if len(content[p]) < size), key=lambda p: load[p])
        content[pack].append(thing)
        load[pack] += weight[thing]
    return np.array(content, int)


def _replicate(weight: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """``total`` copies of things of ``weight`` ``[n]``, one of each at least: each copy's thing and number."""
    things, copies = list(range(len(weight))), [0] * len(weight)
    counts = np.ones(len(weight), int)
    for _ in range(total - len(weight)):
        thing = int(np.argmax(weight / counts))
        things.append(thing)
        copies.append(counts[thing])
        counts[thing] += 1
    return np.array(things), np.array(copies)


def _checked(weight: ArrayLike, replicas: int, groups: int, nodes: int, devices: int) -> tuple[np.ndarray, int, int]:
    """The weights, and the groups and nodes that count: 1 and 1 where they are ignored."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise errors.CollectiveError(f"rebalance_experts: {message}")

    for name, number in {"replicas": replicas, "groups": groups, "nodes": nodes, "devices": devices}.items():
        checks.integer(number, f"rebalance_experts: {name}")
    try:
        weight = np.asarray(weight, np.float64)
    except (TypeError, ValueError) as error:
        raise errors.CollectiveError(f"rebalance_experts: weight is no array of numbers: {error}") from error
    require(weight.ndim == 2 and weight.shape[1] > 0, f"weight of shape {weight.shape} must be [layers, experts]")
    require(bool(np.isfinite(weight).all() and (weight >= 0).all()), "weights must be finite and not negative")
    require(min(groups, nodes, devices) >= 1, f"{groups=}, {nodes=}, {devices=} must be 1 or more")
    if groups % nodes:
        groups = nodes = 1
    experts = weight.shape[1]
    require(replicas >= experts, f"{replicas=} is less than one of each of {experts} experts")
    require(experts % groups == 0, f"{experts} experts do not divide into {groups} equal groups")
    require(devices % nodes == 0, f"{devices} devices do not divide among {nodes} nodes")
    require(replicas % devices == 0, f"{replicas=} is not a multiple of {devices} devices")
    return weight, groups, nodes
