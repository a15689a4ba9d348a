"""BUILD's targets, and the imports that it is held to."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping

FOLDERS = ("glass_jax", "models", "benchmarks", "tests")

# Import names that differ from the distribution's.
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "tvm": "tilelang", "xdist": "pytest-xdist"}


@dataclasses.dataclass(frozen=True)
class Target:
    """One rule of BUILD.

    Attributes:
      rule: ``py_library`` or ``py_test``.
      name: its name; ``:name`` is its label.
      deps: labels of what it depends on.
      srcs: its modules, stubs included, paths from the root.
      data: files that it needs at run time, paths from the root.
    """

    rule: str
    name: str
    deps: list[str]
    srcs: list[str]
    data: list[str]


def read(root: pathlib.Path) -> list[Target]:
    """The targets of ``root``/BUILD in its order. What BUILD uses of Starlark is Python too, so it is executed."""
    targets: list[Target] = []

    def rule(kind: str):
        def add(*, name, deps, srcs, pyi_srcs=(), data=(), **_):
            targets.append(Target(kind, name, deps, [*srcs, *pyi_srcs], list(data)))

        return add

    def glob(include, exclude=(), allow_empty=False):
        found, left_out = (
            {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern) if path.is_file()}
            for patterns in (include, exclude)
        )
        if not found - left_out and not allow_empty:
            raise ValueError(f"BUILD: glob({include}) finds nothing")
        return sorted(path for path in found - left_out if "__pycache__" not in path)

    names = {"load": lambda *_: None, "package": lambda **_: None, "glob": glob}
    names |= {kind: rule(kind) for kind in ("py_library", "py_test")}
    exec(compile((root / "BUILD").read_text(), "BUILD", "exec"), names)
    return targets


def modules(root: pathlib.Path) -> list[str]:
    """Every Python file of :data:`FOLDERS`, as a path from the root."""
    return sorted(path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that the file imports, anywhere in it; ``from a import b`` counts as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}:{node.lineno}: a relative import; imports are absolute here")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def resolve(name: str, importer: str, files: set[str]) -> str | None:
    """The file of this repository that an import of ``name`` reaches; None if it is somebody else's.

    pytest puts the folders of the tests on the path, so a test also finds the helpers beside it and in tests/.
    """
    folders = [""] if not importer.startswith("tests/") else ["", importer.rpartition("/")[0] + "/", "tests/"]
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        stem = "/".join(parts[:length])
        for folder in folders:
            for file in (f"{folder}{stem}.py", f"{folder}{stem}/__init__.py"):
                if file in files:
                    return file
    return None


def pip_label(distribution: str) -> str:
    """The label of a distribution."""
    return "@pip//" + re.sub(r"[-_.]+", "_", distribution).lower()


def dependencies(target: Target, owner: Mapping[str, str], root: pathlib.Path) -> set[str]:
    """The labels of what ``target``'s modules import; ``owner`` names the target of each module."""
    labels = set()
    for source in target.srcs:
        for name in imports(root / source):
            top = name.partition(".")[0]
            if file := resolve(name, source, set(owner)):
                labels.add(f":{owner[file]}")
            elif top not in sys.stdlib_module_names:
                labels.add(pip_label(_DISTRIBUTIONS.get(top, top)))
    return labels - {f":{target.name}"}
