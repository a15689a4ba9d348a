"""BUILD as the map of the architecture: held to the imports, from top to bottom."""

import pathlib
import re
import tomllib

import pytest

import build_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = {
    "BUILD": """
[
    py_library(name = name, srcs = glob([name + ".py", name + "/*.py"], allow_empty = True), deps = deps)
    for name, deps in {"glass_jax/hw": [":glass_jax/errors", "@pip//numpy"], "glass_jax/errors": []}.items()
]
""",
    "pyproject.toml": '[project]\ndependencies = ["numpy", "jax>=1"]\noptional-dependencies = {test = ["pytest"]}',
    "glass_jax/errors.py": "",
    "glass_jax/hw/chips.py": "import json\nimport numpy as np\nfrom glass_jax import errors",
}


def declared(root: pathlib.Path) -> set[str]:
    """Labels of the distributions that pyproject.toml names, in its dependencies or in an extra."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {build_file.pip_label(re.match(r"[\w.-]+", item).group()) for group in groups for item in group}


def problems(root: pathlib.Path) -> list[str]:
    """What is wrong with BUILD, each with what would be right."""
    targets = build_file.read(root)
    place = {f":{target.name}": index for index, target in enumerate(targets)}
    owners = {file: [target.name for target in targets if file in target.srcs] for file in build_file.modules(root)}
    found = [f"{file} is in {len(names)} targets: {names}" for file, names in owners.items() if len(names) != 1]
    if found:
        return found
    owner = {file: name for file, (name,) in owners.items()}
    reached: dict[str, set[str]] = {}
    for target in reversed(targets):
        label, deps = f":{target.name}", set(target.deps)
        imported = build_file.dependencies(target, owner, root)
        reached[label] = deps.union(*(reached.get(dep, ()) for dep in deps))
        if target.rule == "py_library" and (imported != deps or len(deps) != len(target.deps)):
            right = ", ".join(f'"{dep}"' for dep in sorted(imported, key=lambda dep: (place.get(dep, len(place)), dep)))
            found.append(f"the deps of {label} are what it imports: [{right}]")
        elif missing := imported - reached[label]:
            found.append(f"{label} imports {sorted(missing)}, which its deps do not bring")
        if target.rule == "py_library":
            found += [
                f"{label} imports {dep}, which stands above it"
                for dep in imported
                if place.get(dep, len(place)) < place[label]
            ]
        found += [f"{dep} is not in pyproject.toml" for dep in imported - declared(root) if dep.startswith("@")]
    return found


def test_build_is_what_the_modules_import():
    assert not problems(ROOT), "\n".join(problems(ROOT))
    assert len((ROOT / "BUILD").read_text().splitlines()) < 200


def test_every_declared_package_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {build_file.pip_label(line.partition("==")[0]) for line in lines if "==" in line}
    assert declared(ROOT) <= pinned


def test_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'version = "{version}"' in (ROOT / "MODULE.bazel").read_text().partition("bazel_dep")[0]
    assert re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1) == version


@pytest.mark.parametrize(
    "file, text, found",
    [
        ("glass_jax/hw/chips.py", "from glass_jax.errors import X\ndef f():\n    import numpy.linalg, os.path", ""),
        ("glass_jax/hw/chips.py", "import numpy", 'the deps of :glass_jax/hw are what it imports: ["@pip//numpy"]'),
        ("glass_jax/hw/ir.py", "import jax.numpy", '[":glass_jax/errors", "@pip//jax", "@pip//numpy"]'),
        ("glass_jax/hw/ir.py", "import scipy", "@pip//scipy is not in pyproject.toml"),
        (
            "glass_jax/errors.py",
            "import glass_jax.hw.chips",
            ":glass_jax/errors imports :glass_jax/hw, which stands above it",
        ),
        ("glass_jax/text.py", "", "glass_jax/text.py is in 0 targets"),
        (
            "BUILD",
            "py_library(name = 'x', srcs = glob(['glass_jax/*.py']), deps = [])" + FILES["BUILD"],
            "in 2 targets",
        ),
        ("BUILD", "py_test(name = 't', srcs = glob(['tests/*.py']), deps = [':glass_jax/hw'])" + FILES["BUILD"], ""),
        ("BUILD", "py_test(name = 't', srcs = glob(['tests/*.py']), deps = [])" + FILES["BUILD"], "do not bring"),
    ],
)
def test_says_what_is_wrong(tmp_path, file, text, found):
    files = FILES | {file: text} | ({"tests/test_x.py": "from glass_jax import errors"} if "tests/" in text else {})
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert found in "\n".join(problems(tmp_path)) if found else not problems(tmp_path)


def test_a_glob_that_finds_nothing_is_an_error(tmp_path):
    (tmp_path / "BUILD").write_text("py_library(name = 'x', srcs = glob(['gone/*.py']), deps = [])")
    with pytest.raises(ValueError, match="finds nothing"):
        build_file.read(tmp_path)


def test_a_relative_import_is_an_error(tmp_path):
    (tmp_path / "x.py").write_text("from . import other")
    with pytest.raises(ValueError, match="x.py:1: a relative import"):
        build_file.imports(tmp_path / "x.py")
