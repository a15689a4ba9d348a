"""Finding artifacts: in the process, on disk, by compiling; and when one of these is not as it should be."""

import hashlib
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import glass_jax as glass
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


def only(folder):
    """The one file in a folder."""
    (path,) = folder.iterdir()
    return path


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
    assert [path.name.partition(".")[0] for path in fresh.iterdir()] == [first.key]
    forget(monkeypatch)
    assert cache.compile(GEMM, CHIP) == first
    assert len(compiled) == 1


def test_compiling_is_deterministic(fresh, monkeypatch):
    first = cache.compile(GEMM, CHIP)
    forget(monkeypatch)
    only(fresh).unlink()
    assert cache.compile(GEMM, CHIP) == first


def test_a_kernel_that_is_planned_alike_for_two_chips_is_compiled_once(fresh, compiled):
    assert GEMM.fingerprint("950PR") == GEMM.fingerprint(CHIP)
    assert cache.compile(GEMM, "950PR") == cache.compile(GEMM, CHIP)
    large = GemmKernel(1, False, False, 4096, 4096, 64, "float16", "float16")
    assert large.fingerprint("950PR") != large.fingerprint(CHIP)  # more tiles than either has cores
    assert cache.compile(large, "950PR").block_dim < cache.compile(large, CHIP).block_dim
    assert compiled == [GEMM, large, large]


def test_another_compiler_makes_another_artifact(fresh, compiled, monkeypatch):
    """One byte in a file that makes artifacts: what an older one made is not taken for what this one makes."""
    first = cache.compile(GEMM, CHIP)
    changed = fresh.parent / f"{fresh.name}_decode.py"
    changed.write_text("#")
    monkeypatch.setattr(cache, "_MAKERS", (*cache._MAKERS, changed))
    cache._makers_digest.cache_clear()
    forget(monkeypatch)
    again = cache.compile(GEMM, CHIP)
    cache._makers_digest.cache_clear()
    assert compiled == [GEMM, GEMM] and again.key != first.key and len(list(fresh.iterdir())) == 2


def test_all_that_decodes_is_among_the_makers():
    """Of kernels the fingerprint has the files; what runs and verifies programs changes no artifact."""
    folder = pathlib.Path(compiler.__file__).parent
    assert {path for path in folder.rglob("*.py") if "kernels" not in path.parts} <= set(cache._MAKERS)


def test_find(fresh):
    made = cache.compile(GEMM, CHIP)
    assert cache.find(made.sha) is made
    with pytest.raises(KeyError, match="0000"):
        cache.find("0000")


def signed(body):
    """A file whose digest is right, whatever is in it."""
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


DAMAGES = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a constant": lambda text: text.replace('"Const", "value": ', '"Const", "value": 1', 1),
    "a digit of the source": lambda text: text[:-40] + chr(ord(text[-40]) ^ 1) + text[-39:],
    "another type": lambda text: signed("[]"),
    "a field missing": lambda text: signed('{"key": 1}'),
    "too deep": lambda text: signed("[" * 100_000),
    "another kernel": lambda text: signed(re.sub('"key": "[0-9a-f]{64}"', f'"key": "{"0" * 64}"', text.split("\n")[1])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again_with_one_warning(fresh, compiled, monkeypatch, damage):
    made = cache.compile(GEMM, CHIP)
    path = only(fresh)
    whole = path.read_text()
    damaged = DAMAGES[damage](whole)
    assert damaged != whole
    path.write_text(damaged)
    forget(monkeypatch)
    with pytest.warns(UserWarning, match=f"{path.name} cannot be used") as warned:
        assert cache.compile(GEMM, CHIP) == made
    assert len(compiled) == 2 and len(warned) == 1 and path.read_text() == whole


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


WITHOUT_TILELANG = """
import importlib.metadata, sys
import numpy as np

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tilelang", "tvm", "torch", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}")

def version(name, installed=importlib.metadata.version):
    if name in ("tilelang", "torch", "apache-tvm-ffi"):
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

sys.meta_path.insert(0, Blocker())
importlib.metadata.version = version
import glass_jax as glass
from glass_jax import errors

gate, up = np.float32([[0, 1, -2]]), np.float32([[5, 2, 1]])
out = glass.swiglu(gate, up, implementation="npu_model")
np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
try:
    glass.swiglu(np.ones(4096, np.float32), np.ones(4096, np.float32), implementation="npu_model")
except errors.MissingDependencyError as error:
    print(error)
"""


def test_a_cached_kernel_runs_where_tilelang_is_not_installed(fresh):
    glass.swiglu(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32), implementation="npu_model")
    run = subprocess.run([sys.executable, "-c", WITHOUT_TILELANG], capture_output=True, text=True, check=True)
    assert re.search(r"swiglu_float32_4096 is not in the cache .*glass_jax\[tilelang\]", run.stdout)


def test_tilelang_cannot_be_imported(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "glass_jax.lowering.tilelang.compile", None)
    monkeypatch.delattr("glass_jax.lowering.tilelang.compile")
    with pytest.raises(errors.MissingDependencyError, match=r"cannot be imported .*glass_jax\[tilelang\]"):
        cache.compile(GEMM, CHIP)
