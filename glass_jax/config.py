"""Options of the library: a default, a ``GLASS_*`` variable, and a context manager that is part of JAX's trace key.

The active :class:`Config` is the value of a JAX user context, so a jitted function that was traced under one
configuration is traced again under another: ``glass.configure`` takes effect on the very next call.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax

from glass_jax import errors

IMPLEMENTATIONS = ("xla", "npu_model", "host", "ascend")
KERNEL_IMPLEMENTATIONS = IMPLEMENTATIONS[1:]  # that run an operation's kernel, not its formula
ALIGNMENTS = ("pad", "strict")


@dataclasses.dataclass(frozen=True)
class Config:
    """Values of every option.

    Attributes:
      implementation: ``"xla"``, ``"npu_model"``, ``"host"``, ``"ascend"``, or None: by the platform that a function is
        lowered for.
      chip: the NPU that kernels are generated for and modelled on, see ``glass_jax.hw.chips``.
      alignment: ``"pad"`` pads shapes that the hardware cannot take and slices the result; ``"strict"`` raises instead.
      debug: print each kernel's tile sizes, memory map, padding and cache use as it is prepared.
    """

    implementation: str | None = None
    chip: str = "950DT"
    alignment: str = "pad"
    debug: bool = False


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, each value valid, chips by their canonical name."""
    from glass_jax.hw import chips

    names = [field.name for field in dataclasses.fields(Config)]
    for name in options:
        if name not in names:
            raise TypeError(f"glass.configure: unknown option {name!r}; the options are {', '.join(names)}")
    check_implementation(options.get("implementation"))
    if (alignment := options.get("alignment", "pad")) not in ALIGNMENTS:
        raise ValueError(f"{alignment=} is not one of {', '.join(ALIGNMENTS)}")
    if not isinstance(options.get("debug", False), bool):
        raise TypeError(f"debug must be a bool, got {options['debug']!r}")
    if "chip" in options:
        options = options | {"chip": chips.get(options["chip"]).name}
    return options


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless ``implementation`` is None or the name of an implementation."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} is not one of {', '.join(IMPLEMENTATIONS)}, or None to decide by platform")


@functools.cache
def _from_environment() -> Config:
    """The configuration that the ``GLASS_*`` variables describe, read once, when it is first needed."""
    options: dict[str, Any] = {}
    for name in ("implementation", "chip", "alignment"):
        if value := os.environ.get(f"GLASS_{name.upper()}"):
            options[name] = value
    if value := os.environ.get("GLASS_DEBUG"):
        if value.lower() not in ("0", "1", "true", "false"):
            raise errors.GlassError(f"GLASS_DEBUG={value}: set it to 1 or 0")
        options["debug"] = value.lower() in ("1", "true")
    try:
        return Config(**_checked(options))
    except ValueError as error:
        variables = ", ".join(f"GLASS_{name.upper()}={value}" for name, value in options.items())
        raise errors.GlassError(f"{error} (read from the environment: {variables})") from error


_context = jax.make_user_context(default_value=None)  # None: nothing was configured, the environment decides


def current() -> Config:
    """The configuration in force."""
    return _context.value or _from_environment()


class configure:  # noqa: N801 - a function to its users
    """Sets options, for a block or from here on.

    ``glass.configure(implementation="npu_model")`` takes effect at once and stays; used as
    ``with glass.configure(...):`` the previous values return at the end of the block. A jitted function called under a
    different configuration is traced again. Like JAX's own contexts it is of the calling thread; other threads have the
    values of the environment.

    Args:
      implementation: ``"xla"``, ``"npu_model"``, ``"host"``, ``"ascend"`` or None (by platform).
      chip: a chip's name, for example ``"950DT"``.
      alignment: ``"pad"`` or ``"strict"``.
      debug: print every kernel's tiling, memory map, padding and cache use.

    Raises:
      ValueError: a value is not one of those above (an unknown chip's message lists the known ones).
      TypeError: an option does not exist.
    """

    def __init__(self, **options: Any):
        self._previous = _context.value
        _set(dataclasses.replace(current(), **_checked(options)))

    def __enter__(self) -> Config:
        return current()

    def __exit__(self, *exc_info: object) -> None:
        _set(self._previous)


def _set(config: Config | None) -> None:
    _context(config).__enter__()  # this thread's value, which is what JAX keys its traces by
