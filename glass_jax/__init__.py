"""glass_jax: Ascend NPU kernels as JAX operations, with a model of the NPU to run them on.

The public names are the lines of ``__init__.pyi``. They load when they are first used, so that a model that only
multiplies starts without the rest.
"""

import importlib
import pathlib
import re

from glass_jax.lowering import ascend as _ascend  # noqa: F401  (makes the platform known to JAX)

_LINE = re.compile(r"^from (?P<module>\S+) import (?P<name>\w+) as (?P=name)", re.MULTILINE)
_NAMES = pathlib.Path(__file__).with_suffix(".pyi").read_text()
_MODULES = {line["name"]: line["module"] for line in _LINE.finditer(_NAMES)}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if module == __name__:
        return importlib.import_module(f"{module}.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
