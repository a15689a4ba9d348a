"""Finding artifacts: in the process, on disk, by compiling; and when one of these is not as it should be."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import textwrap
import threading

import pytest

from glass_jax import config, errors
from glass_jax.lowering import artifact, cache
from glass_jax.lowering.tilelang import compile as compiler
from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel

CHIP = "950DT"
GEMM = GemmKernel(1, False, False, 16, 32, 64, "float16", "float16")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has used no kernel, with an empty cache."""
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_entries", {})
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that TileLang compiled."""
    kernels, original = [], compiler.compile

    def compile_and_record(kernel, *args):
        kernels.append(kernel)
        return original(kernel, *args)

    monkeypatch.setattr(compiler, "compile", compile_and_record)
    return kernels


def forget(monkeypatch):
    monkeypatch.setattr(cache, "_entries", {})


def test_json_round_trip():
    made = cache.compile(GEMM, CHIP)
    again = artifact.from_json(artifact.to_json(made))
    assert again == made and again.sha == made.sha
    assert artifact.to_json(again) == artifact.to_json(made)


def test_process_then_disk_then_compiler(fresh, compiled, monkeypatch):
    first = cache.compile(GEMM, CHIP)
    assert cache.compile(GEMM, "ascend950dt") is first
    assert [path.stem for path in fresh.iterdir()] == [first.key]
    forget(monkeypatch)
    assert cache.compile(GEMM, CHIP) == first
    assert len(compiled) == 1


def test_compiling_is_deterministic(fresh, monkeypatch):
    first = cache.compile(GEMM, CHIP)
    forget(monkeypatch)
    (fresh / f"{first.key}.json").unlink()
    assert cache.compile(GEMM, CHIP) == first


def test_find(fresh):
    made = cache.compile(GEMM, CHIP)
    assert cache.find(made.sha) is made
    with pytest.raises(KeyError, match="0000"):
        cache.find("0000")


@pytest.mark.parametrize(
    "damage", [lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: '{"key": 1}']
)
def test_a_damaged_file_is_made_again(fresh, compiled, monkeypatch, capfd, damage):
    made = cache.compile(GEMM, CHIP)
    path = fresh / f"{made.key}.json"
    path.write_text(damage(path.read_text()))
    forget(monkeypatch)
    with config.configure(debug=True):
        assert cache.compile(GEMM, CHIP) == made
    assert len(compiled) == 2 and "cannot be used" in capfd.readouterr().err
    assert json.loads(path.read_text())["key"] == made.key


def test_a_file_of_another_kernel_is_made_again(fresh, compiled, monkeypatch):
    made = cache.compile(GEMM, CHIP)
    path = fresh / f"{made.key}.json"
    path.write_text(path.read_text().replace(made.key, "0" * 64))
    forget(monkeypatch)
    assert cache.compile(GEMM, CHIP) == made
    assert len(compiled) == 2


def test_threads_compile_once(fresh, compiled):
    results = []
    threads = [threading.Thread(target=lambda: results.append(cache.compile(GEMM, CHIP))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result is results[0] for result in results)
    assert compiled == [GEMM]


def test_a_second_process_does_not_import_the_compiler(fresh):
    made = cache.compile(GEMM, CHIP)
    script = f"""
        import sys
        from glass_jax.lowering import artifact, cache
        from glass_jax.lowering.tilelang.kernels.gemm import GemmKernel
        made = cache.compile({GEMM!r}, {CHIP!r})
        print(made.sha, sorted({{"tilelang", "tvm", "torch"}} & set(sys.modules)))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert run.stdout.split(maxsplit=1) == [made.sha, "[]\n"]


def test_a_folder_that_cannot_be_written(fresh, monkeypatch, capfd):
    blocker = fresh / "file"
    blocker.write_text("")
    monkeypatch.setenv("GLASS_CACHE_DIR", str(blocker / "cache"))
    assert cache.compile(GEMM, CHIP).entry
    assert "cannot be written" in capfd.readouterr().err


def test_cache_dir(monkeypatch):
    monkeypatch.delenv("GLASS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_dir() == pathlib.Path("/somewhere/glass_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == pathlib.Path.home() / ".cache" / "glass_jax"
    monkeypatch.setenv("GLASS_CACHE_DIR", "/elsewhere")
    assert cache.cache_dir() == pathlib.Path("/elsewhere")


def test_debug_shows_each_kernel_once(fresh, capfd):
    with config.configure(debug=True):
        cache.compile(GEMM, CHIP)
        cache.compile(GEMM, CHIP)
    shown = capfd.readouterr().err
    assert shown.count("kernel gemm_float16_16x32x64 for 950DT: cache miss, compiled in") == 1
    assert "tiles 16x" in shown and "512.0 KiB" in shown and "gemm.a" in shown


def test_chips_without_a_generator():
    with pytest.raises(errors.UnsupportedError, match=r"910B3 .* can be verified against but not generated for.*950DT"):
        cache.compile(GEMM, "910B3")


def test_tilelang_is_not_installed(fresh, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    cache._compiler_versions.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(errors.MissingDependencyError, match=r"tilelang is not installed.*glass_jax\[tilelang\]"):
        cache.compile(GEMM, CHIP)
    cache._compiler_versions.cache_clear()


def test_tilelang_cannot_be_imported(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "glass_jax.lowering.tilelang.compile", None)
    monkeypatch.delattr("glass_jax.lowering.tilelang.compile")
    with pytest.raises(errors.MissingDependencyError, match=r"cannot be imported .*glass_jax\[tilelang\]"):
        cache.compile(GEMM, CHIP)
