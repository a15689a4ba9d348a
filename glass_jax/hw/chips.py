"""The Ascend chips: cores, clocks, memories and rates, read from ``chips.json``.

Every number of a chip comes from that file, and every row of it names its source. A family holds what its chips share:
the rates of the cube and of the copy pipes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
import types
from collections.abc import Mapping

from glass_jax import errors
from glass_jax.hw.ir.program import Space

CUBE_M = CUBE_N = (
    16  # rows and columns of C that the cube computes in one cycle; the depth depends on the type: Chip.cube_k
)
C0_BYTES = 32  # innermost extent of the fractal layouts, and the unit of the on-chip copies
GENERATED_ARCH = "dav-3510"  # the only architecture that the public TileLang generates code for

_CAPACITY_FIELDS = {
    Space.L0A: "l0a_bytes",
    Space.L0B: "l0b_bytes",
    Space.L0C: "l0c_bytes",
    Space.L1: "l1_bytes",
    Space.GM: "hbm_bytes",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One Ascend chip (one die where a package holds two).

    Attributes:
      name: the name users say, for example ``"950DT"`` or ``"910B3"``.
      soc: the vendor's name, for example ``"Ascend950DT"``.
      family: ``"910A"``, ``"910B"`` (910B1 to 910B4 and the dies of the 910C) or ``"950"``.
      arch: architecture of the cores, for example ``"dav-3510"``.
      cube_cores: number of cube cores: how many blocks run at once of a kernel that uses the cube.
      vector_cores: number of vector units: how many blocks run at once of a kernel that does not; 0 on the 910A, whose
        cores hold a cube and a vector unit together.
      clock_mhz: clock of the cores, MHz.
      l0a_bytes, l0b_bytes, l0c_bytes, l1_bytes, ub_bytes, bias_table_bytes: on-chip memories of one core (of one
        vector unit for the unified buffer), bytes; None where the source does not give it.
      l2_bytes, hbm_bytes: memories of the chip, bytes, or None.
      gm_bytes_per_second: peak rate of global memory, bytes per second, or None.
      l2_bytes_per_second: peak rate of the L2 cache, bytes per second, or None.
      ub_reserved_bytes: part of the unified buffer that the runtime keeps, bytes.
      simt_context_bytes: part of the unified buffer that thread contexts take in a kernel with SIMT regions, bytes.
      cube_k: operand types the cube takes (``"hf32"`` is the reduced float32 mode), and for each the depth K of the
        16 x 16 x K product it computes in one cycle.
      bytes_per_cycle: rate of the copies between two on-chip memories, by (source, destination).
      gib_per_second: measured rate of one core's copies, GiB/s, by (source, destination); empty where unpublished.
      source: where the numbers come from.
    """

    name: str
    soc: str
    family: str
    arch: str
    cube_cores: int
    vector_cores: int
    clock_mhz: int
    l0a_bytes: int
    l0b_bytes: int
    l0c_bytes: int
    l1_bytes: int
    ub_bytes: int
    bias_table_bytes: int | None
    l2_bytes: int | None
    hbm_bytes: int | None
    gm_bytes_per_second: int | None
    l2_bytes_per_second: int | None
    ub_reserved_bytes: int
    simt_context_bytes: int
    cube_k: Mapping[str, int] = dataclasses.field(compare=False)
    bytes_per_cycle: Mapping[tuple[Space, Space], int] = dataclasses.field(compare=False)
    gib_per_second: Mapping[tuple[Space, Space], float] = dataclasses.field(compare=False)
    source: str

    @property
    def has_generator(self) -> bool:
        """Whether the public TileLang generates Ascend C for this chip."""
        return self.arch == GENERATED_ARCH

    def capacity(self, space: Space) -> int | None:
        """Usable bytes of ``space``, or None where the space has no size of its own or the source does not give it."""
        if space is Space.UB:
            return self.ub_bytes - self.ub_reserved_bytes
        field = _CAPACITY_FIELDS.get(space)
        return getattr(self, field) if field else None

    def peak_flops(self, dtype: str = "float16") -> float:
        """Peak rate of the cube, operations per second: cube cores x 16 x 16 x K x 2 x clock.

        Args:
          dtype: type of the operands, one of :attr:`cube_k`.

        Raises:
          HardwareConstraintError: the cube does not take ``dtype``.
        """
        if dtype not in self.cube_k:
            known = ", ".join(self.cube_k)
            raise errors.HardwareConstraintError(f"the cube of {self.name} does not take {dtype}; it takes {known}")
        return self.cube_cores * CUBE_M * CUBE_N * self.cube_k[dtype] * 2 * self.clock_mhz * 1e6


def _paths(rates: dict[str, float]) -> Mapping[tuple[Space, Space], float]:
    """``{"l1->l0a": rate}`` keyed by the pair of spaces."""
    return types.MappingProxyType({tuple(map(Space, path.split("->"))): rate for path, rate in rates.items()})


@functools.cache
def _table() -> Mapping[str, Chip]:
    """Every chip by its name, in the order of the file."""
    data = json.loads(importlib.resources.files("glass_jax.hw").joinpath("chips.json").read_text())
    chips = {}
    for row in data["chips"]:
        family = data["families"][row["family"]]
        shared = {
            "ub_reserved_bytes": family["ub_reserved_bytes"],
            "simt_context_bytes": family["simt_context_bytes"],
            "l2_bytes_per_second": family["l2_bytes_per_second"],
            "cube_k": types.MappingProxyType(family["cube_k"]),
            "bytes_per_cycle": _paths(family["bytes_per_cycle"]),
            "gib_per_second": _paths(family["gib_per_second"]),
            "source": f"{row['source']}. Rates: {family['source']}",
        }
        chips[row["name"]] = Chip(**row | shared)
    return types.MappingProxyType(chips)


@functools.cache
def _spellings() -> Mapping[str, Chip]:
    """Every accepted spelling, in lower case. ``910B`` is left out: to users it is a family, not a chip."""
    spellings = {}
    for chip in _table().values():
        for spelling in (
            chip.name,
            chip.soc,
            chip.soc.removeprefix("Ascend"),
            f"Ascend{chip.name.removeprefix('Ascend')}",
        ):
            spellings[spelling.lower()] = chip
    del spellings["910b"]
    return spellings


def names() -> tuple[str, ...]:
    """Names of the known chips, as :func:`get` returns them."""
    return tuple(_table())


def get(name: str) -> Chip:
    """The chip called ``name``, in any case, with or without ``Ascend``: ``"950DT"``, ``"ascend950dt"``.

    ``"910C"`` is one of its two dies. ``"910B"`` is refused: people mean 910B1 to 910B4, and the chip of exactly that
    name is a 910A (it is there as ``"Ascend910B"``).

    Raises:
      HardwareConstraintError: there is no such chip.
    """
    chip = _spellings().get(str(name).strip().lower())
    if chip is not None:
        return chip
    key = str(name).strip().lower().removeprefix("ascend")
    close = [known for known in names() if key and known.lower().startswith(key)]
    close = close or difflib.get_close_matches(key.upper(), names(), n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise errors.HardwareConstraintError(f"unknown chip {name!r}: {hint}The known chips are {', '.join(names())}")
