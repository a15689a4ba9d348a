"""What ``glass.fuse`` did, and what it did not do and why."""

from __future__ import annotations

import dataclasses

from glass_jax import text


@dataclasses.dataclass(frozen=True)
class Site:
    """A place where the equations of a pattern were found.

    Attributes:
      pattern: name of the pattern.
      where: file, line and function of the matrix product in it.
      within: what is around it, outermost first, such as ``"scan > checkpoint"``, and the name scope, if there is one.
      operands: types and shapes of what the product multiplies.
      parts: what was found, in its order.
      fused: whether one operation replaces it.
      reason: why it does not; if it does, why it does not replace more, or empty.
    """

    pattern: str
    where: str
    within: str
    operands: str
    parts: str
    fused: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """All sites of a function, in the order in which they were decided.

    ``str()`` of it is a table.
    """

    sites: tuple[Site, ...]

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that one operation replaces."""
        return tuple(site for site in self.sites if site.fused)

    @property
    def not_fused(self) -> tuple[Site, ...]:
        """The sites that stay as they are, each with its reason."""
        return tuple(site for site in self.sites if not site.fused)

    def __str__(self) -> str:
        if not self.sites:
            return "glass.fuse: no matrix products"
        rows = [("", "pattern", "found", "product at", "of", "reason")]
        for site in self.sites:
            file = site.where.rpartition("/")[2]
            where = f"{file} in {site.within}" if site.within else file
            verdict = "fused" if site.fused else "left"
            rows.append((verdict, site.pattern, site.parts, where, site.operands, site.reason))
        return f"glass.fuse: {len(self.fused)} of {len(self.sites)} sites fused\n{text.table(rows)}"
