"""Rules of the architecture that an import or a line of text would break."""

import graphlib
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import build_file
import glass_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = build_file.modules(ROOT)
LIBRARY = [module for module in MODULES if module.startswith("glass_jax/")]

# A module imports from its own layer and from those before it. What is in none of these stands on top.
LAYERS = ("errors", "text", "hw", "config", "lowering", "primitives", "sharding")

# Rooms of hw, and the rooms whose modules theirs may import.
HW = {
    "ir": set(),
    "chips": {"ir"},
    "memory": {"ir", "chips"},
    "order": {"ir", "memory"},
    "rules": {"ir", "chips", "memory", "order"},
    "verifier": {"ir", "chips", "memory", "rules"},
    "model/values": {"ir"},
    "model/evaluation": {"ir", "model/values"},
    "model/tiles": {"ir", "model/values", "model/evaluation"},
    "model/vector": {"ir", "model/values", "model/evaluation"},
    "model/simd": {"ir", "model/values", "model/evaluation", "model/vector"},
    "model": {"ir", "order", "model/values", "model/evaluation", "model/tiles", "model/vector", "model/simd"},
}

COMPILER = {"tilelang", "tvm", "torch"}
# The public names: module, name and document of each line.
PUBLIC = re.findall(
    r"^from (\S+) import (\w+) as \2  # (docs/\S+)$", (ROOT / "glass_jax/__init__.pyi").read_text(), re.MULTILINE
)


def layer(module: str) -> int:
    part = pathlib.PurePosixPath(module).with_suffix("").parts[1]
    return LAYERS.index(part) if part in LAYERS else len(LAYERS)


def targets(module: str) -> set[str]:
    """The files of this repository that ``module`` imports, anywhere in it."""
    found = {build_file.resolve(name, module, set(MODULES)) for name in build_file.imports(ROOT / module)}
    return found - {None, module}


def hw_room(module: str) -> str | None:
    """The room of hw that ``module`` is in, None if it is not in hw."""
    path = pathlib.PurePosixPath(module).with_suffix("")
    if path.parts[:2] != ("glass_jax", "hw") or path.name == "__init__":
        return None
    folder = "/".join(path.parts[2:-1])
    return folder or path.name


def top_names(module: str) -> set[str]:
    """The packages that ``module`` imports, the standard library left out."""
    return {name.partition(".")[0] for name in build_file.imports(ROOT / module)} - set(sys.stdlib_module_names)


def test_arrows_run_one_way():
    upward = []
    for module in LIBRARY:
        for name in build_file.imports(ROOT / module):
            target = build_file.resolve(name, module, set(MODULES))
            if target is not None and (target not in LIBRARY or layer(target) > layer(module)):
                upward.append(f"{module} imports {name}")
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other():
    """Imports for type checkers and inside functions count; the package's own names, which load lazily, do not."""
    graph = {module: targets(module) - {"glass_jax/__init__.py"} for module in LIBRARY}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_arrows_between_the_rooms_of_hw():
    for module in LIBRARY:
        room = hw_room(module)
        if room is not None:
            reached = {hw_room(target) for target in targets(module)} - {None, room}
            assert reached <= HW[room], f"{module} imports from {sorted(reached - HW[room])}"


def test_the_npu_knows_jax_and_numpy_only():
    """And outside of the model that runs programs, nobody but itself."""
    for module in LIBRARY:
        if module.startswith("glass_jax/hw/"):
            others = {"jax", "numpy"} if module.startswith("glass_jax/hw/model/") else set()
            assert top_names(module) <= {"glass_jax"} | others, module


def test_only_one_room_imports_the_compiler():
    outside = [module for module in LIBRARY if not module.startswith("glass_jax/lowering/tilelang/")]
    assert not [module for module in outside if top_names(module) & COMPILER]


def test_no_private_jax():
    private = re.compile(r"\bjax\b[\w.]*\._[a-z]|\bfrom jax\b[\w.]* import _")
    found = {module: private.findall((ROOT / module).read_text()) for module in MODULES}
    assert not {module: names for module, names in found.items() if names and (ROOT / module) != pathlib.Path(__file__)}


def test_importing_the_library_loads_no_compiler():
    code = f"import sys, glass_jax; print(*sorted(set(sys.modules) & {COMPILER!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_public_names():
    lines = (ROOT / "glass_jax/__init__.pyi").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith("#")]) == len(PUBLIC), "a line reads otherwise"
    names = [name for _, name, _ in PUBLIC]
    assert sorted(names) == sorted(glass_jax.__all__) and len(set(names)) == len(names)
    assert set(names) <= set(dir(glass_jax))
    with pytest.raises(AttributeError, match="'glass_jax' has no attribute 'gem'"):
        _ = glass_jax.gem


@pytest.mark.parametrize(("module", "name", "document"), PUBLIC, ids=[name for _, name, _ in PUBLIC])
def test_a_public_name_is_what_its_line_says(module, name, document):
    public = getattr(glass_jax, name)
    assert public is getattr(importlib.import_module(module), name) and public.__doc__
    assert getattr(public, "__module__", module) == module  # not passed on by another module
    assert re.search(rf"`{name}`|\bglass\.{name}\b", (ROOT / document).read_text()), f"not in {document}"
