"""What is built for others to install: the wheel has all of glass_jax, the source distribution all that tests need."""

import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("glass_jax", "models", "benchmarks", "tests", "docs")
FILES = ("BUILD", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "MODULE.bazel", "Makefile", "README.md", "constraints.txt")
BUILD = "from setuptools import build_meta as b; print(b.build_sdist('dist'), b.build_wheel('dist'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the source distribution and in the wheel, from the root of each; and what is in the repository."""
    root = tmp_path_factory.mktemp("packaging") / "glass_jax"
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    for file in (*FILES, "pyproject.toml"):
        shutil.copy(ROOT / file, root)
    present = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    run = subprocess.run([sys.executable, "-c", BUILD], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    sdist, wheel = (root / "dist" / name for name in run.stdout.splitlines()[-1].split())
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        unpacked = {name.partition("/")[2] for name in tar.getnames()}
        return unpacked, set(archive.namelist()), present


def test_the_source_distribution_is_the_repository(built):
    unpacked, _, present = built
    assert present - unpacked == set()


def test_the_wheel_is_the_library(built):
    _, installed, present = built
    assert {name for name in installed if ".dist-info/" not in name} == {
        name for name in present if name.startswith("glass_jax/")
    }
