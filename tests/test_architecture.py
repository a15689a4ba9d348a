"""Rules of the architecture that an import or a line of text would break; the layers themselves are BUILD's."""

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

COMPILER = {"tilelang", "tvm", "torch"}
# The public names: module, name and document of each line.
PUBLIC = re.findall(
    r"^from (\S+) import (\w+) as \2  # (docs/\S+)$", (ROOT / "glass_jax/__init__.pyi").read_text(), re.MULTILINE
)


def targets(module: str) -> set[str]:
    """The files of this repository that ``module`` imports, anywhere in it."""
    found = {build_file.resolve(name, module, set(MODULES)) for name in build_file.imports(ROOT / module)}
    return found - {None, module}


def top_names(module: str) -> set[str]:
    """The packages that ``module`` imports, the standard library left out."""
    return {name.partition(".")[0] for name in build_file.imports(ROOT / module)} - set(sys.stdlib_module_names)


def test_no_modules_import_each_other():
    """Imports for type checkers and inside functions count; the package's own names, which load lazily, do not."""
    graph = {module: targets(module) - {"glass_jax/__init__.py"} for module in LIBRARY}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


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
