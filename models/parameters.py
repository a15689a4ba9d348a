"""Parameters of Flax modules by name, as plain dictionaries: what files and exported functions hold."""

from __future__ import annotations

from typing import Any

from flax import nnx


def named(state: nnx.State) -> dict[str, Any]:
    """Values of all variables by their place in the module, for example ``"blocks.0.attention.q.kernel"``."""
    return {dotted(place): variable.get_value() for place, variable in nnx.to_flat_state(state)}


def from_named(state: nnx.State, values: dict[str, Any]) -> nnx.State:
    """A state with the variables of ``state`` and the values of ``values``, the inverse of :func:`named`."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(place, variable.replace(values[dotted(place)])) for place, variable in flat])


def dotted(place: tuple) -> str:
    """A place in a module as a name."""
    return ".".join(map(str, place))
