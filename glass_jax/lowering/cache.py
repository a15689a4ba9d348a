"""How a compiled kernel is found: in memory, on disk, or by asking TileLang.

Nothing here imports TileLang; :func:`compile` reaches for ``glass_jax.lowering.tilelang`` only when the artifact of a
kernel is not in the cache, so a second process that uses the same kernels never loads the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import textwrap
import threading
import time
import warnings

from glass_jax import config, errors
from glass_jax.hw import chips, memory
from glass_jax.hw.ir import program as ir
from glass_jax.hw.ir import serialization
from glass_jax.lowering.artifact import Artifact, Kernel, from_json, to_json

_COMPILERS = ("tilelang", "apache-tvm-ffi")
_HERE = pathlib.Path(__file__).parent
# What an artifact depends on besides its kernel: these files make it and say what it looks like.
_MAKERS = (
    pathlib.Path(__file__),
    _HERE / "artifact.py",
    pathlib.Path(ir.__file__),
    pathlib.Path(serialization.__file__),
    *sorted((_HERE / "tilelang").glob("*.py")),
)
_SUFFIX = ".kernel"  # a line with the sha256 of the rest, then the artifact as JSON


class _Entry:
    """The artifact of one kernel for one chip in this process; its lock is held while it is being made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.artifact: Artifact | None = None
        self.shown = False


_entries: dict[tuple[Kernel, str], _Entry] = {}
_entries_lock = threading.Lock()


def compile(kernel: Kernel, chip: str) -> Artifact:  # noqa: A001
    """The artifact of ``kernel`` for ``chip``, compiled at most once a machine.

    Looks in this process, then in the cache on disk (:func:`cache_dir`), and only then asks TileLang. Threads that ask
    for the same kernel wait for one of them to make it.

    Args:
      kernel: the kernel.
      chip: name of the chip, as ``glass_jax.hw.chips`` knows it.

    Raises:
      UnsupportedError: no code is generated for the chip, or the kernel uses something that a Program cannot say.
      MissingDependencyError: TileLang is needed and not installed.
      GlassError: TileLang refused the kernel.
    """
    known = chips.get(chip)
    if not known.has_generator:
        targets = ", ".join(name for name in chips.names() if chips.get(name).has_generator)
        raise errors.UnsupportedError(
            f"{known.name} ({known.arch}) can be verified against but not generated for: the public TileLang generates "
            f"code for {targets} only. Choose one of these, for example with glass.configure(chip='950DT')"
        )
    with _entries_lock:
        entry = _entries.setdefault((kernel, known.name), _Entry())
    with entry.lock:
        start, origin = time.perf_counter(), "from this process"
        if entry.artifact is None:
            entry.artifact, origin = _load_or_make(kernel, known)
        if config.current().debug and not entry.shown:
            entry.shown = True
            _show(kernel, known, entry.artifact, f"{origin} in {1e3 * (time.perf_counter() - start):.0f} ms")
    return entry.artifact


def find(sha: str) -> Artifact:
    """The artifact whose source has this sha256, among those that this process used.

    Raises:
      KeyError: there is none.
    """
    with _entries_lock:
        known = [entry.artifact for entry in _entries.values() if entry.artifact is not None]
    for artifact in known:
        if artifact.sha == sha:
            return artifact
    raise KeyError(f"no kernel used in this process has a source with sha256 {sha}")


def _load_or_make(kernel: Kernel, chip: chips.Chip) -> tuple[Artifact, str]:
    """The artifact, and in words where it comes from."""
    # Not the chip: what a kernel makes of it is in the fingerprint; planned alike for two chips it is one kernel.
    parts = (kernel.fingerprint(chip.name), chip.arch, _makers_digest())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    for path in _candidates(key):
        artifact = _read(path, key)
        if artifact is not None:
            return artifact, "cache hit, read"
    try:
        from glass_jax.lowering.tilelang import compile as compiler
    except ImportError as error:
        raise errors.MissingDependencyError(_missing(kernel, error)) from error
    versions = _compiler_versions()
    artifact = compiler.compile(kernel, chip.name, key, chip.arch, versions)
    _write(_path(key, versions), artifact)
    return artifact, "cache miss, compiled"


def _missing(kernel: Kernel, error: ImportError) -> str:
    return (
        f"kernel {kernel.name} is not in the cache {cache_dir()}, and TileLang, which compiles it, cannot be imported "
        f"({error}): pip install 'glass_jax[tilelang]', or use implementation='xla'"
    )


@functools.cache
def _compiler_versions() -> dict[str, str] | None:
    """Versions of the compilers, None where they are not installed: cached kernels run all the same."""
    try:
        return {name: importlib.metadata.version(name) for name in _COMPILERS}
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _makers_digest() -> str:
    digest = hashlib.sha256()
    for path in _MAKERS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _show(kernel: Kernel, chip: chips.Chip, artifact: Artifact, how: str) -> None:
    lines = [f"kernel {kernel.name} for {chip.name}: {how}", f"  {kernel.describe(chip.name)}"]
    from glass_jax.hw import verifier  # for debug output alone

    used = verifier.memory_of(artifact.program, chip, artifact.memory)
    lines.append(textwrap.indent(memory.memory_map(used, chip), "  "))
    print("glass: " + "\n".join(lines), file=sys.stderr, flush=True)


# --- on disk -------------------------------------------------------------------------------------------------------


def cache_dir() -> pathlib.Path:
    """The folder of the cache: ``$GLASS_CACHE_DIR``, else ``glass_jax`` in the user's cache folder; a file a kernel."""
    if folder := os.environ.get("GLASS_CACHE_DIR"):
        return pathlib.Path(folder)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "glass_jax"


def files() -> list[pathlib.Path]:
    """The files of the cache, one a kernel and version of the compilers."""
    folder = cache_dir()
    return sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []


def _path(key: str, versions: dict[str, str]) -> pathlib.Path:
    made_by = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()
    return cache_dir() / f"{key}.{made_by[:16]}{_SUFFIX}"


def _candidates(key: str) -> list[pathlib.Path]:
    """Files that may hold the artifact: that of the compilers installed, or where none are, any, the newest first."""
    versions = _compiler_versions()
    if versions is not None:
        return [_path(key, versions)]
    found = cache_dir().glob(f"{key}.*{_SUFFIX}")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _read(path: pathlib.Path, key: str) -> Artifact | None:
    """The artifact in a file, None if there is no such file or it does not hold what was written, which is said."""
    try:
        digest, _, body = path.read_text().partition("\n")
        if digest != hashlib.sha256(body.encode()).hexdigest():
            raise ValueError("its digest is not that of its contents")
        artifact = from_json(body)
        if artifact.key != key:
            raise ValueError(f"it holds the kernel of key {artifact.key}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"the cached kernel {path} cannot be used, so it is compiled again ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return None
    return artifact


def _write(path: pathlib.Path, artifact: Artifact) -> None:
    """Writes a file so that a reader sees all of it or nothing. A folder that cannot be written costs only time."""
    body = to_json(artifact)
    text = f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        print(
            f"glass: kernels are compiled again in the next process: {path.parent} cannot be written ({error})",
            file=sys.stderr,
        )
