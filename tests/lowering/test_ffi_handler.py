"""The C++ handler of a bundle, built by the bundle's own Makefile against a stub of CANN, and called by XLA."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stub_kernels

from glass_jax.lowering import ascend, bundle, cache

pytestmark = pytest.mark.skipif(not shutil.which("g++") or not shutil.which("make"), reason="needs g++ and make")

X = np.arange(16, dtype=np.float32)
Y = np.cos(X)
FAILURE = (jax.errors.JaxRuntimeError, ValueError)  # a handler's error; the second where jit dispatches in C++

# The two tools of CANN that compile kernels: here, the host's compiler, once the flags are those of the real ones.
BISHENG = """#!/bin/sh -e
case "$*" in
  *"--cce-aicore-only --npu-arch=dav-3510 -I"*"/tilelang/src "*) ;;
  *) echo "unexpected flags: $*" >&2; exit 1;;
esac
while [ "$1" != "${1%.asc}.asc" ]; do shift; done
exec g++ -shared -fPIC -x c "$1" -o "$3"
"""
LLD = """#!/bin/sh -e
case "$*" in "-m aicorelinux -Ttext 0 --no-mmap-output-file "*".rel -o "*".o") ;; *) exit 1;; esac
while [ $# -gt 3 ]; do shift; done
exec cp "$1" "$3"
"""


class State(ctypes.Structure):
    """What the stub remembers, see stub_acl.cc."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("launches", "binaries_loaded", "functions_loaded", "block_dim")),
        *((name, ctypes.c_uint32) for name in ("dynamic_ub_bytes", "parameters")),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


def program(alpha, x, y):
    low, high = stub_kernels.split(jnp.concatenate([stub_kernels.axpy(alpha, x, y)] * 2))
    return low - high


def compile_library(output: pathlib.Path, *arguments: str) -> pathlib.Path:
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", "-std=c++17", *warnings, "-fPIC", "-shared", *arguments, "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> pathlib.Path:
    """A bundle of ``program``, with kernels and handler compiled as its README says."""
    root = tmp_path_factory.mktemp("handler")
    with stub_kernels.installed():
        path = bundle.export(program, np.float32(2), X, Y, path=root / "bundle", platforms=("cpu",))
    cann = root / "cann"
    shutil.copytree(stub_kernels.STUB / "acl", cann / "include" / "acl")
    (cann / "lib64").mkdir()
    compile_library(
        cann / "lib64" / "libascendcl.so",
        f"-I{cann}/include", str(stub_kernels.STUB / "stub_acl.cc"), "-ldl", "-Wl,-soname,libascendcl.so",
    )  # fmt: skip
    for name, text in (("bisheng", BISHENG), ("ld.lld", LLD)):
        (cann / name).write_text(text)
        (cann / name).chmod(0o755)
    variables = {"PYTHON": sys.executable, "CANN": cann, "BISHENG": cann / "bisheng", "LLD": cann / "ld.lld"}
    arguments = [f"{name}={value}" for name, value in variables.items()]
    make = ["make", "-C", str(path / "runtime"), *arguments, "CXXFLAGS=-O0 -Werror"]
    run = subprocess.run(make, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return root


@pytest.fixture(scope="session")
def stub(built) -> ctypes.CDLL:
    """The stub runtime, with the handler registered for the CPU."""
    runtime = built / "bundle" / "runtime"
    # TileLang, once imported, puts functions of the same names in the process's global scope: look at one's own first.
    own_first = os.RTLD_NOW | os.RTLD_DEEPBIND
    library = ctypes.CDLL(str(built / "cann" / "lib64" / "libascendcl.so"), mode=own_first)
    library.stub_state.restype = ctypes.POINTER(State)
    on_cpu = compile_library(
        built / "on_cpu.so",
        "-isystem", jax.ffi.include_dir(), f"-I{built}/cann/include", f"-I{runtime}",
        str(stub_kernels.STUB / "handler_on_cpu.cc"), str(runtime / "libglass_ffi.so"),
    )  # fmt: skip
    handler = ctypes.CDLL(str(on_cpu), mode=own_first).GlassTilelangCallOnCpu
    jax.ffi.register_ffi_target(ascend.TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return library


@pytest.fixture
def state(stub, built, monkeypatch) -> State:
    """What the stub remembers, nothing yet; kernels are found and nothing is told to fail."""
    monkeypatch.setenv("GLASS_KERNEL_PATH", f"/nowhere:{built / 'bundle' / 'kernels'}")
    stub.stub_reset()
    with stub_kernels.installed():
        yield stub.stub_state().contents
    stub.stub_fail(b"")


def test_launch(state):
    np.testing.assert_allclose(jax.jit(stub_kernels.axpy)(3.0, X, Y), 3 * X + Y, rtol=1e-6)
    assert (state.launches, state.block_dim, state.parameters, state.dynamic_ub_bytes) == (1, 2, 4, 4096)
    assert state.stream == 0x5717  # what handler_on_cpu.cc passes


def test_several_results_and_no_unified_buffer(state):
    low, high = jax.jit(stub_kernels.split)(np.concatenate([X, Y]))
    np.testing.assert_array_equal(low, np.concatenate([X, Y])[0::2])
    np.testing.assert_array_equal(high, np.concatenate([X, Y])[1::2])
    assert (state.launches, state.parameters, state.dynamic_ub_bytes) == (1, 3, 0)


def test_reloaded_bundle_runs(state, built):
    exported = jax.export.deserialize(bytearray((built / "bundle" / "module.stablehlo").read_bytes()))
    axpy = 2 * X + Y
    twice = np.concatenate([axpy, axpy])
    np.testing.assert_allclose(exported.call(np.float32(2), X, Y), twice[0::2] - twice[1::2], rtol=1e-6)
    assert state.launches == 2


def test_a_kernel_is_loaded_once_a_device(state):
    call = jax.jit(stub_kernels.axpy)
    for device in (5, 5, 6, 5):
        state.device = device
        call(3.0, X, Y).block_until_ready()
    assert (state.launches, state.binaries_loaded, state.functions_loaded) == (4, 2, 2)


@pytest.mark.parametrize("function", ["aclrtGetDevice", "aclrtBinaryLoadFromFile", "aclrtBinaryGetFunction"])
def test_failure_of_the_runtime(state, stub, function):
    state.device = 100 + len(function)  # nothing is loaded there yet
    stub.stub_fail(function.encode())
    with pytest.raises(FAILURE, match=f"{function} failed with ACL error 507018 .*stub: {function} was told to fail"):
        jax.jit(stub_kernels.axpy)(3.0, X, Y).block_until_ready()
    assert state.launches == 0
    stub.stub_fail(b"")
    jax.jit(stub_kernels.axpy)(3.0, X, Y).block_until_ready()  # a failure is not remembered
    assert state.launches == 1


def test_failure_of_the_launch(state, stub):
    stub.stub_fail(b"aclrtLaunchKernelWithHostArgs")
    message = r"aclrtLaunchKernelWithHostArgs failed .* for axpy_kernel \(dav-3510\), 2 blocks, 4096 bytes"
    with pytest.raises(FAILURE, match=message):
        jax.jit(stub_kernels.axpy)(3.0, X, Y).block_until_ready()


@pytest.mark.parametrize("folders", [None, "", "/nowhere:/tmp"])
def test_kernel_not_compiled(state, monkeypatch, folders):
    state.device = 200
    monkeypatch.delenv("GLASS_KERNEL_PATH")
    if folders is not None:
        monkeypatch.setenv("GLASS_KERNEL_PATH", folders)
    with pytest.raises(FAILURE, match=r"no file \w{64}\.o for kernel axpy_kernel .*make -C"):
        jax.jit(stub_kernels.axpy)(3.0, X, Y).block_until_ready()


def test_workspace_without_device_memory(state):
    # XLA's CPU client gives handlers no device memory.
    with pytest.raises(FAILURE, match="no device memory for the workspace of kernel axpy_kernel, 512 bytes"):
        jax.jit(lambda: stub_kernels.axpy(3.0, X, Y, workspace_bytes=512))().block_until_ready()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"abi": np.int64(2)}, "exported with abi 2, this handler understands 1"),
        ({"kernel": "../../etc/passwd"}, "not a sha256"),
        ({"entry": "nothing"}, "aclrtBinaryGetFunction failed .* for nothing in"),
        ({"block_dim": np.int64(0)}, "block_dim=0"),
        ({"block_dim": np.int64(2**32)}, "block_dim=4294967296"),
        ({"dynamic_ub_bytes": np.int64(-1)}, "dynamic_ub_bytes=-1"),
        ({"launch_order": np.array([1, 3, 0])}, "3 entries for 4 buffers"),
        ({"launch_order": np.array([1, 3, 0, 4])}, "not a permutation of its 4 buffers: entry 4"),
        ({"launch_order": np.array([1, 3, 0, 1])}, "not a permutation of its 4 buffers: entry 1"),
        ({"block_dim": "2"}, "no valid attribute block_dim"),
        ({"launch_order": None}, "no valid attribute launch_order"),
    ],
)
def test_call_that_no_version_of_the_library_emits(state, change, message):
    made = cache.compile(stub_kernels.StubKernel("axpy", 2), stub_kernels.CHIP)
    attributes = {
        "abi": np.int64(1),
        "arch": "dav-3510",
        "block_dim": np.int64(2),
        "dynamic_ub_bytes": np.int64(0),
        "entry": made.entry,
        "kernel": made.sha,
        "launch_order": np.array([1, 3, 0, 2]),
        "workspace_bytes": np.int64(0),
    } | change
    present = {name: value for name, value in attributes.items() if value is not None}
    call = jax.ffi.ffi_call(ascend.TARGET, jax.ShapeDtypeStruct((16,), jnp.float32))
    with pytest.raises(FAILURE, match=message):
        jax.jit(lambda x, alpha, y: call(x, alpha, y, **present))(X, np.ones(1, np.float32), Y).block_until_ready()
    assert state.launches == 0


def test_npu_handler_is_exported(built, stub):
    assert ctypes.CDLL(str(built / "bundle" / "runtime" / "libglass_ffi.so")).GlassTilelangCall
