"""A user's own TileLang kernel as a :class:`glass_jax.lowering.artifact.Kernel`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from glass_jax import errors
from glass_jax.lowering.artifact import Argument


@dataclasses.dataclass(frozen=True)
class UserKernel:
    """A kernel that exists as a PrimFunc. Equal to another if both print the same and stand at the same place.

    Attributes:
      name: the kernel's name.
      outputs: positions of the results among the parameters.
      arguments: the parameters.
      pass_configs: options of TileLang's passes, by name.
      text: the whole kernel in TileLang's script form.
      lines: ``file:line`` of its statements, which messages about the kernel name.
      func: the PrimFunc.
    """

    name: str
    outputs: tuple[int, ...]
    arguments: tuple[Argument, ...]
    pass_configs: tuple[tuple[str, Any], ...]
    text: str = dataclasses.field(repr=False)
    lines: tuple[str, ...] = dataclasses.field(repr=False)
    func: Any = dataclasses.field(repr=False, compare=False)

    def fingerprint(self, chip: str) -> str:
        """The kernel's text, where it stands, and what it is compiled with; the same for every chip."""
        return "\n".join([self.name, str(self.outputs), str(self.pass_configs), self.text, *self.lines])

    def describe(self, chip: str) -> str:
        """Says that the tiling is the user's."""
        return f"a kernel of the user's, sha256 {hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def build(self, chip: str) -> object:
        """The PrimFunc."""
        return self.func


def user_kernel(func: Any, *args: Any, out_idx: Sequence[int] | int | None = None, **kwargs: Any) -> UserKernel:
    """The kernel that ``func`` is.

    Args:
      func: a ``@T.prim_func``, or a ``@tilelang.jit`` function.
      *args: arguments of the ``@tilelang.jit`` function; a ``@T.prim_func`` takes none.
      out_idx: positions of the results among the kernel's parameters, negative ones from the end. Default: what
        ``@tilelang.jit`` says, else the last parameter.
      **kwargs: like ``args``.

    Raises:
      HardwareConstraintError: ``func`` is no kernel, takes no such arguments, or has no parameter at ``out_idx`` that
        could be a result.
    """
    from tvm import tirx  # there already: the kernel was made with it

    from glass_jax.lowering.tilelang import decode, places

    pass_configs = {}
    if hasattr(func, "get_tir"):
        pass_configs = {str(getattr(key, "value", key)): value for key, value in (func.pass_configs or {}).items()}
        out_idx = func.out_idx if out_idx is None else out_idx
        func = func.get_tir(*args, **kwargs)
    elif args or kwargs:
        raise errors.HardwareConstraintError(
            "arguments are for @tilelang.jit functions; a @T.prim_func is a kernel as it is"
        )
    if not isinstance(func, tirx.PrimFunc):
        raise errors.HardwareConstraintError(
            f"expected a TileLang kernel (a @T.prim_func or a @tilelang.jit function), got {type(func).__name__}"
        )
    if decode.is_split(func):
        pass_configs.setdefault(decode.AUTO_SCHEDULE, False)
    name = str(func.attrs["global_symbol"])
    indices = [-1] if out_idx is None else [out_idx] if isinstance(out_idx, int) else list(out_idx)
    count = len(func.params)
    if bad := [index for index in indices if not -count <= index < count]:
        raise errors.HardwareConstraintError(
            f"kernel {name}: out_idx {bad} of {count} parameters; use 0 to {count - 1}"
        )
    outputs = tuple(index % count for index in indices)
    arguments = tuple(_argument(func, position, position in outputs) for position in range(count))
    text = func.script(show_meta=True)
    return UserKernel(name, outputs, arguments, tuple(sorted(pass_configs.items())), text, places.lines(func), func)


def _argument(func: Any, position: int, output: bool) -> Argument:
    param = func.params[position]
    if param not in func.buffer_map:
        if output:
            raise errors.HardwareConstraintError(
                f"kernel {func.attrs['global_symbol']}: parameter {param.name} is a scalar and cannot be a result"
            )
        return Argument(str(param.name), (), str(param.dtype), False)
    buffer = func.buffer_map[param]
    shape = tuple(int(size) if isinstance(size, int) or hasattr(size, "value") else None for size in buffer.shape)
    return Argument(str(buffer.name), shape, str(buffer.dtype), output)
