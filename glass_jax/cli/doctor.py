"""``glass doctor``: what is installed, which chips are known, what is in the kernel cache, what is configured."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform

import jax

from glass_jax import config
from glass_jax.hw import chips
from glass_jax.hw.ir.program import Space
from glass_jax.lowering import cache
from glass_jax.text import table

SUMMARY = "Show versions, known chips, the kernel cache, devices and the configuration in force."

_PACKAGES = ("glass_jax", "jax", "jaxlib", "numpy", "flax", "tilelang", "torch")
_TILELANG_HINT = ": kernels that are not in the cache cannot be compiled; pip install 'glass_jax[tilelang]'"
_HINTS = {"glass_jax": ": running from its source", "tilelang": _TILELANG_HINT, "torch": _TILELANG_HINT}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Makes ``parser`` the parser of ``glass doctor``."""
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    del args  # it has none of its own
    sections = {
        "Versions": _versions(),
        "Chips": _chips(),
        "Kernel cache": _cache(),
        "JAX devices": _devices(),
        "Configuration": _configuration(),
    }
    print("\n\n".join(f"{title}\n{body}" for title, body in sections.items()))
    return 0


def _versions() -> str:
    """Versions by their metadata: importing TileLang or torch would take seconds."""
    rows = [("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, f"not installed{_HINTS.get(package, '')}"))
    return table(rows, indent=2)


def _size(nbytes: int | None) -> str:
    """``nbytes`` in the largest binary unit that does not make it less than 1."""
    if nbytes is None:
        return "?"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def _chips() -> str:
    spaces = {"L1": Space.L1, "L0A": Space.L0A, "L0B": Space.L0B, "L0C": Space.L0C, "UB": Space.UB, "GM": Space.GM}
    rows = [("name", "soc", "cube", "vector", "MHz", "fp16 TFLOP/s", *spaces, "generator")]
    for name in chips.names():
        chip = chips.get(name)
        rows.append(
            (
                chip.name,
                chip.soc,
                str(chip.cube_cores),
                str(chip.vector_cores or "in cube"),
                str(chip.clock_mhz),
                f"{chip.peak_flops() / 1e12:.1f}",
                *(_size(chip.capacity(space)) for space in spaces.values()),
                "yes" if chip.has_generator else "no",
            )
        )
    return table(rows, left=(0, 1, 6 + len(spaces)), indent=2)


def _cache() -> str:
    files = cache.files()
    total = sum(file.stat().st_size for file in files)
    return table([("folder", str(cache.cache_dir())), ("kernels", str(len(files))), ("size", _size(total))], indent=2)


def _devices() -> str:
    rows = [(str(device.id), device.platform, device.device_kind) for device in jax.devices()]
    return table([("id", "platform", "kind"), *rows], indent=2)


def _configuration() -> str:
    active = config.current()
    rows = []
    for field in dataclasses.fields(active):
        variable = f"GLASS_{field.name.upper()}"
        origin = (
            f"{variable}={os.environ[variable]}"
            if os.environ.get(variable)
            else f"default; set {variable} to change it"
        )
        rows.append((field.name, str(getattr(active, field.name)), origin))
    return table(rows, indent=2)
