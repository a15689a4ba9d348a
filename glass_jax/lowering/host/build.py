"""Generated Ascend C compiled for this machine: the runtime and TileLang's templates once, then a library a kernel.

Everything lies in the folder ``host`` of the kernel cache, under names that hold a digest of what it was made of: the
source, the runtime's files, TileLang's device templates, the compiler and the processor. Files appear whole or not at
all, so that processes may share the folder.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import jax

from glass_jax import errors
from glass_jax.lowering import cache
from glass_jax.lowering.host import adapt

_HERE = pathlib.Path(__file__).parent
RUNTIME = _HERE / "runtime"
_HANDLER = _HERE / "handler.cc"
# No fused multiply-add that the kernel does not ask for: the bits are the chip's. Operands are read through any type.
_FLAGS = ["-std=c++20", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-Wno-psabi"]
_KERNEL_FLAGS = [*_FLAGS, "-O1", "-fvisibility=hidden"]  # the precompiled header serves only where all flags are equal
_SOURCE = "kernel.asc"  # what the compiler calls a kernel's source in its messages


def kernel_library(source: str, name: str) -> pathlib.Path:
    """The shared library of a kernel, which exports ``glass_host_launch`` of ``runtime/glass_host.h``.

    Args:
      source: the generated Ascend C.
      name: the kernel's name, for messages.

    Raises:
      MissingDependencyError: there is no C++ compiler, or TileLang, whose templates the source includes, is missing.
      UnsupportedError: the source makes a call that the runtime does not have; the message names it and its line.
      GlassError: the source is not C++; the message has the compiler's first lines.
    """
    unit = adapt.translation_unit(source, _SOURCE)
    folder = _toolkit()
    path = folder / f"{hashlib.sha256(unit.encode()).hexdigest()}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        text, library = pathlib.Path(scratch, "kernel.cc"), pathlib.Path(scratch, "kernel.so")
        text.write_text(unit)
        includes = [f"-I{path}" for path in (folder, RUNTIME, _templates())]
        link = ["-shared", "-L", str(folder), "-lglass_host", f"-Wl,-rpath,{folder}", "-Wl,-z,defs"]
        run = _run([compiler(), *_KERNEL_FLAGS, *includes, str(text), "-o", str(library), *link])
        if run.returncode:
            raise _refusal(name, run.stderr)
        os.replace(library, path)
    return path


def handler_library() -> pathlib.Path:
    """The library of the FFI handler that launches kernels for XLA."""
    key = hashlib.sha256(_HANDLER.read_bytes() + jax.__version__.encode()).hexdigest()[:32]
    path = _toolkit() / f"handler-{key}.so"
    if not path.exists():
        _compile(path, ["-O2", "-shared", "-isystem", jax.ffi.include_dir(), f"-I{RUNTIME}", str(_HANDLER)])
    return path


@functools.cache
def compiler() -> str:
    """The C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ that is on the path.

    Raises:
      MissingDependencyError: there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise errors.MissingDependencyError(
        'implementation="host" compiles generated code for this machine and finds no C++ compiler: install g++ 12 or '
        "clang++ 15 or newer (for example the Debian package g++), or name one in CXX"
    )


def _templates() -> pathlib.Path:
    """The folder of TileLang's device templates, found without importing it."""
    found = importlib.util.find_spec("tilelang")
    if found is None or found.origin is None:
        raise errors.MissingDependencyError(
            'implementation="host" compiles generated code against the device templates of TileLang, which is not '
            "installed: pip install 'glass_jax[tilelang]'"
        )
    return pathlib.Path(found.origin).parent / "src"


@functools.cache
def _toolkit() -> pathlib.Path:
    """The folder of what all kernels share: the runtime's library and the precompiled header, made if need be."""
    folder = cache.cache_dir() / "host" / _toolkit_key()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together wait for the first
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                _make_toolkit(pathlib.Path(scratch))
                shutil.copytree(scratch, f"{scratch}.whole")
                os.rename(f"{scratch}.whole", folder)
    return folder


def _make_toolkit(folder: pathlib.Path) -> None:
    sources = sorted(RUNTIME.glob("*.cc"))
    header = [*_KERNEL_FLAGS, "-x", "c++-header", f"-I{RUNTIME}", f"-I{_templates()}", str(RUNTIME / "kernel.h")]
    jobs = [(folder / f"{source.stem}.o", [*_FLAGS, "-O3", "-c", str(source)]) for source in sources]
    jobs.insert(0, (folder / "kernel.h.gch", header))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda job: _compile(*job), jobs))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    _compile(folder / "libglass_host.so", ["-shared", *objects, "-pthread", "-Wl,-soname,libglass_host.so"])
    for each in objects:
        os.remove(each)


def _toolkit_key() -> str:
    digest = hashlib.sha256()
    version = _run([compiler(), "--version"]).stdout
    for part in (version, _processor(), str(_FLAGS), str(_KERNEL_FLAGS)):
        digest.update(part.encode() + b"\0")
    templates = _templates() / "tl_templates" / "ascend"
    for path in (*sorted(RUNTIME.rglob("*")), *sorted(templates.glob("*.h"))):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(output: pathlib.Path, arguments: Sequence[str]) -> None:
    """Compiles something of the library's own, which appears whole."""
    part = output.with_name(f".{os.getpid()}.{output.name}")
    flags = [] if "-c" in arguments or "c++-header" in arguments else _FLAGS
    run = _run([compiler(), *flags, *arguments, "-o", str(part)])
    if run.returncode:
        raise errors.GlassError(
            f"{compiler()} does not compile {arguments[-1]} of the host runtime; it needs C++20 (g++ 12, clang++ 15):\n"
            f"{_first_lines(run.stderr)}"
        )
    os.replace(part, output)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _refusal(name: str, messages: str) -> errors.GlassError:
    """What to raise for a kernel that does not compile."""
    missing = adapt.missing_call(messages, _SOURCE)
    if missing is not None:
        call, line = missing
        place = f" in line {line} of its source" if line else ""
        return errors.UnsupportedError(
            f'kernel {name} calls {call}{place}, which implementation="host" does not have; implementation="npu_model" '
            "may run it"
        )
    return errors.GlassError(f"the code generated for kernel {name} is not C++:\n{_first_lines(messages)}")


def _first_lines(messages: str) -> str:
    lines = [line for line in messages.splitlines() if "error" in line] or messages.splitlines()
    return "\n".join(lines[:5])
