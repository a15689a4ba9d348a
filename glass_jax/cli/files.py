"""Kernels in a user's Python file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from glass_jax import errors
from glass_jax.lowering import collect


def keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """``["M=128", "dtype=float16"]`` as keyword arguments: Python literals where they are some, else text.

    Raises:
      GlassError: an argument is not of this form.
    """
    result = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key.isidentifier():
            raise errors.GlassError(f"{argument!r} is not key=value")
        try:
            result[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            result[key] = text
    return result


def _is_function(value: Any) -> bool:
    """Whether ``value`` is a function, also one that is wrapped, for example by ``functools.cache``."""
    return inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def load(file: str, name: str, arguments: dict[str, Any]) -> Any:
    """The TileLang kernel that ``name`` is in ``file``; a function is called with ``arguments`` to make one.

    Raises:
      GlassError: there is no such file or name, or running it fails.
    """
    module = _module(pathlib.Path(file))
    if not hasattr(module, name):
        own = sorted(key for key, value in vars(module).items() if _is_function(value) or collect.is_tilelang(value))
        raise errors.GlassError(f"{file} has no {name!r}; it has {', '.join(own) or 'nothing'}")
    value = getattr(module, name)
    make = getattr(value, "get_tir", value if _is_function(value) else None)
    if make is not None:
        call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        value = _guarded(f"{file}: {call}", make, **arguments)
    elif arguments:
        raise errors.GlassError(f"{file}: {name!r} is a {type(value).__name__} and takes no arguments")
    if not collect.is_tilelang(value):
        raise errors.GlassError(f"{file}: {name!r} is {type(value).__name__}, not a TileLang kernel")
    return value


def _module(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise errors.GlassError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise errors.GlassError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours, as when it is run
    sys.modules[path.stem] = module
    _guarded(str(path), spec.loader.exec_module, module)
    return module


def _guarded(what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whatever it raises as a GlassError of one line."""
    silenced = logging.root.manager.disable
    logging.disable()  # TileLang logs the code it was given, at length
    try:
        return function(*args, **kwargs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise errors.GlassError(f"{what}: {type(error).__name__}: {lines[-1] if lines else 'no message'}") from error
    finally:
        logging.disable(silenced)
