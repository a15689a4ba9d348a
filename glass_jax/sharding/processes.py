"""Whether several processes are about to run the same program."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from glass_jax import errors

_DIGEST, _TEXT = 32, 992  # bytes that a process tells the others


def check_processes(f: Callable[..., Any], *args: Any) -> None:
    """Raises an error on every process unless all of them are about to run the same program on arrays of the same
    shapes.

    Programs that differ wait for each other for ever, or read each other's messages as something else. Every process
    calls this before the first call of ``f``; it traces ``f`` without compiling it, and exchanges a digest of a fixed
    size.

    Args:
      f: what the processes are about to call together, jitted or not.
      *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.

    Raises:
      CollectiveError: the processes differ; the message says in which arguments, or that it is the program.
    """
    shapes = [f"{jax.tree_util.keystr(path)[1:-1]}: {_shape(leaf)}" for path, leaf in jax.tree.leaves_with_path(args)]
    text = ", ".join(shapes)
    program = re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*args)))
    digest = hashlib.sha256(f"{text}\n{program}".encode()).digest()
    told = digest + text.encode()[:_TEXT].ljust(_TEXT)
    everybody = np.asarray(multihost_utils.process_allgather(np.frombuffer(told, np.uint8))).reshape(
        -1, _DIGEST + _TEXT
    )
    others = [
        process for process in range(len(everybody)) if (everybody[process, :_DIGEST] != everybody[0, :_DIGEST]).any()
    ]
    if not others:
        return
    texts = [everybody[process, _DIGEST:].tobytes().decode(errors="replace").strip() for process in (0, others[0])]
    what = f"process 0 has {texts[0]}, process {others[0]} has {texts[1]}; "
    what += "give every process arrays of the same shapes and dtypes"
    if texts[0] == texts[1]:
        what = "their arguments are alike and what they do with them is not; look for code that depends on the process"
    raise errors.CollectiveError(
        f"processes 0 and {', '.join(map(str, others))} are about to run different programs: {what}"
    )


def _shape(leaf: Any) -> str:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return f"{aval.dtype.name}{list(aval.shape)}"
