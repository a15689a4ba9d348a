"""BUILD as the map of the architecture, and the reader that holds it to the imports."""

import pathlib
import re
import tomllib

import pytest

import build_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = """
load("@rules_python//python:py_library.bzl", "py_library")

# Kept.
py_library(
    name = "glass_jax/hw",
    srcs = ["glass_jax/hw/__init__.py"] + ["glass_jax/hw/chips.py"],
    data = glob(["glass_jax/hw/*.json"]),
    deps = ["@pip//numpy"],
)
"""
PROJECT = """
[project]
dependencies = ["numpy", "jax>=1"]
optional-dependencies = {test = ["pytest"]}
"""


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small repository whose BUILD is right for the two modules of one package."""
    files = {
        "BUILD": LIBRARIES,
        "pyproject.toml": PROJECT,
        "glass_jax/hw/__init__.py": "",
        "glass_jax/hw/chips.py": "import json\nimport numpy as np",
        "glass_jax/hw/chips.json": "[]",
    }
    for name, text in files.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: pathlib.Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_build_is_what_the_modules_import():
    found = list(build_file.problems(ROOT))
    assert not found, "\n".join(["`make build-file` updates the lists; a cycle has to be cut.", *found])


def test_rewriting_changes_nothing():
    assert build_file.rewritten(ROOT) == (ROOT / "BUILD").read_text()


def test_every_data_file_is_in_a_target():
    files = {path for folder in build_file.FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    data = {ROOT / name for target in build_file.read(ROOT) for name in target.data}
    missing = sorted(str(path.relative_to(ROOT)) for path in files - data if path.suffix not in (".py", ".pyc"))
    assert not missing, f"in no target's data: {missing}"


def test_every_declared_package_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {build_file.pip_label(line.partition("==")[0]) for line in lines if "==" in line}
    assert build_file.declared(ROOT) <= pinned


def test_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'version = "{version}"' in (ROOT / "MODULE.bazel").read_text().partition("bazel_dep")[0]
    assert re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1) == version


# --- the reader ----------------------------------------------------------------------------------------------------


def test_reads_sums_and_globs(repository):
    (target,) = build_file.read(repository)
    assert target.srcs == ("glass_jax/hw/__init__.py", "glass_jax/hw/chips.py")
    assert target.data == ("glass_jax/hw/chips.json",)
    assert target.deps == ("@pip//numpy",)
    assert not list(build_file.problems(repository))


@pytest.mark.parametrize(
    "text",
    [
        "SRCS = []",
        "genrule(name = 'x')",
        "[py_library(name = n, srcs = []) for n in ['a']]",
        "py_library('x', srcs = [])",
        "py_library(name = 'x')",
        "py_library(name = 'x', srcs = [str(1)])",
        "py_library(name = 'x', srcs = [], data = glob(['nothing/*']))",
    ],
)
def test_anything_else_is_an_error(repository, text):
    write(repository, "BUILD", text)
    with pytest.raises(build_file.BuildFileError, match="BUILD:1: "):
        build_file.read(repository)


@pytest.mark.parametrize(
    "statement, deps",
    [
        ("import glass_jax.hw.chips", [":glass_jax/hw"]),
        ("from glass_jax.hw import chips", [":glass_jax/hw"]),
        ("from glass_jax.hw.chips import get", [":glass_jax/hw"]),
        ("def f():\n    from glass_jax import hw", [":glass_jax/hw"]),
        ("import glass_jax as glass", [":glass_jax"]),
        ("from glass_jax import gemm", [":glass_jax"]),
        ("import jax.numpy as jnp, os.path", ["@pip//jax"]),
        ("if False:\n    import numpy", ["@pip//numpy"]),
    ],
)
def test_imports_become_dependencies(repository, statement, deps):
    write(repository, "glass_jax/__init__.py", "")
    write(repository, "models/train.py", statement)
    targets = {target.name: target for target in build_file.expected(repository)}
    assert list(targets["models"].deps) == deps


def test_a_test_depends_on_its_helpers_and_on_what_runs_it(repository):
    write(repository, "tests/conftest.py", "import jax")
    write(repository, "tests/hw/programs.py", "import glass_jax.hw")
    write(repository, "tests/hw/test_chips.py", "import programs")
    targets = {target.name: target for target in build_file.expected(repository)}
    assert targets["tests/hw/test_chips"].deps == (":tests/conftest", ":tests/hw/programs", "@pip//pytest")
    assert targets["tests/hw/test_chips"].rule == build_file.TEST
    assert targets["tests/hw/programs"].rule == build_file.LIBRARY


@pytest.mark.parametrize(
    "module, rule, name",
    [
        ("glass_jax/__init__.py", build_file.LIBRARY, "glass_jax"),
        ("glass_jax/errors.py", build_file.LIBRARY, "glass_jax/errors"),
        ("glass_jax/hw/rules/copies.py", build_file.LIBRARY, "glass_jax/hw"),
        ("glass_jax/nn/moe.py", build_file.LIBRARY, "glass_jax/nn"),
        ("models/__init__.py", build_file.LIBRARY, "models"),
        ("tests/hw/test_chips.py", build_file.TEST, "tests/hw/test_chips"),
        ("tests/hw/programs.py", build_file.LIBRARY, "tests/hw/programs"),
    ],
)
def test_where_a_new_module_goes(module, rule, name):
    assert build_file.home(module, {"glass_jax", "glass_jax/hw"}) == (rule, name)


def test_a_relative_import_is_an_error(repository):
    write(repository, "glass_jax/hw/chips.py", "from . import other")
    with pytest.raises(build_file.BuildFileError, match=r"chips.py:1: a relative import"):
        list(build_file.problems(repository))


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("glass_jax/errors.py", "", "glass_jax/errors.py is in 0 targets"),
        ("glass_jax/hw/chips.py", "import json", "imports something else than it declares"),
        ("glass_jax/hw/chips.py", "import numpy, scipy", "imports @pip//scipy, which pyproject.toml does not name"),
        ("BUILD", LIBRARIES + 'py_library(name = "x", srcs = ["glass_jax/hw/chips.py"])', "is in 2 targets"),
        ("BUILD", LIBRARIES + 'py_library(name = "x", srcs = ["models/gone.py"])', "does not exist"),
    ],
)
def test_says_what_is_wrong(repository, file, text, message):
    write(repository, file, text)
    assert message in "\n".join(build_file.problems(repository))


def test_finds_a_cycle(repository):
    write(repository, "glass_jax/errors.py", "import glass_jax.hw.chips")
    write(repository, "glass_jax/hw/chips.py", "def f():\n    from glass_jax import errors")
    write(repository, "BUILD", build_file.rewritten(repository))
    (problem,) = build_file.problems(repository)
    assert "glass_jax/hw -> :glass_jax/errors -> :glass_jax/hw" in problem


def test_rewriting_adds_what_is_missing_and_keeps_comments(repository):
    write(repository, "glass_jax/errors.py", "")
    write(repository, "glass_jax/hw/ir/program.py", "import jax\nfrom glass_jax import errors")
    write(repository, "tests/test_errors.py", "from glass_jax import errors")
    (repository / "glass_jax/hw/chips.py").unlink()
    write(repository, "BUILD", build_file.rewritten(repository))
    assert not list(build_file.problems(repository))
    text = (repository / "BUILD").read_text()
    assert '# Kept.\npy_library(\n    name = "glass_jax/hw"' in text
    assert 'data = glob(["glass_jax/hw/*.json"]),' in text
    assert build_file.rewritten(repository) == text
