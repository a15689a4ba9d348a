"""``glass.export``: a JAX function as a folder that a machine with an NPU can build and run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.resources
import json
import os
import pathlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export as jax_export
from jax.extend import mlir as jax_mlir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from glass_jax import config, errors
from glass_jax.hw import chips, verifier
from glass_jax.lowering import artifact, ascend, cache

FORMAT = "glass_jax bundle"
PLATFORMS = ("ascend", "cpu", "cuda", "rocm", "tpu")
RUNTIME = (
    "Makefile", "README.md", "glass_ffi_handler.cc", "glass_ffi_handler.h", "glass_launch.cc", "glass_launch.h",
)  # fmt: skip


def export(
    fn: Callable[..., Any], *args: Any, path: str | os.PathLike[str], platforms: Sequence[str] = (ascend.PLATFORM,)
) -> pathlib.Path:
    """Writes ``fn``, lowered for ``args``, as a bundle.

    The bundle is a folder: ``module.stablehlo`` (what ``jax.export.deserialize`` reads), ``kernels/<sha256>.asc`` (the
    Ascend C of every kernel that the module launches), ``manifest.json`` (signatures of the function and the kernels,
    launch parameters, versions) and ``runtime/`` (the XLA FFI handler that launches the kernels, and how to build it).
    Its bytes depend on the function, the shapes, the active configuration and the versions of the compilers, and on
    nothing else: not on the time, the machine, the folder or line of the source, or the state of the kernel cache.

    Args:
      fn: the function; one that is already jitted keeps its options. An argument that it donates shares its buffer with
        a result of its shape and dtype: a cache or an optimizer's state is in the NPU's memory once.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``, sharded or not; shapes, dtypes and shardings count.
      path: the folder to write. A bundle that is there already is replaced as a whole; anything else is refused.
      platforms: what to lower for, of ``"ascend"``, ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``. With ``"cpu"``
        among them, the reloaded module also runs without an NPU.

    Returns:
      The folder's path.

    Raises:
      HardwareConstraintError: ``platforms`` names an unknown platform, or none.
      UnsupportedError: the function calls back into Python, or a kernel's operands are sharded over Auto mesh axes, or
        it donates arguments and ``platforms`` has others beside ``"ascend"``.
      OutOfOnChipMemoryError: a kernel's buffers do not fit the configured chip.
      GlassError: ``path`` exists and is not a bundle.
    """
    path = pathlib.Path(path)
    _check_platforms(platforms)
    _check_replaceable(path)
    exported = lower(fn, args, platforms)
    kernels = launched(exported)
    made = {sha: cache.find(sha) for sha in kernels}
    for each in made.values():
        verifier.check_memory(each.program, chips.get(config.current().chip), each.memory)
    files = {f"kernels/{sha}.asc": each.source.encode() for sha, each in made.items()}
    files["module.stablehlo"] = bytes(exported.serialize())
    files["manifest.json"] = (json.dumps(_manifest(exported, kernels), indent=2, sort_keys=True) + "\n").encode()
    sources = importlib.resources.files("glass_jax.lowering") / "runtime"
    files |= {f"runtime/{name}": (sources / name).read_bytes() for name in RUNTIME}
    _write(path, files)
    return path


def _check_platforms(platforms: Sequence[str]) -> None:
    unknown = [platform for platform in platforms if platform not in PLATFORMS]
    if isinstance(platforms, str) or unknown or not platforms:
        raise errors.HardwareConstraintError(
            f"{platforms=} must be a sequence of one or more of {', '.join(PLATFORMS)}"
        )


def _check_replaceable(path: pathlib.Path) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((path / "manifest.json").read_text()).get("format") == FORMAT:
            return
    raise errors.GlassError(
        f"{path} exists and is not a bundle of glass.export, so it is left alone: choose another path, or remove it"
    )


# --- the module ----------------------------------------------------------------------------------------------------

# Part of JAX's trace key: an earlier use of the function may have left a lowering with source locations in JAX's cache.
_exporting = jax.make_user_context(default_value=False)
_location_lock = threading.RLock()


@contextlib.contextmanager
def _without_source_locations() -> Iterator[None]:
    """Functions lowered inside carry the names of their operations, but no files and lines."""
    with _location_lock, _exporting(True):
        limit = jax.config.jax_traceback_in_locations_limit
        jax.config.update("jax_traceback_in_locations_limit", 0)
        try:
            yield
        finally:
            jax.config.update("jax_traceback_in_locations_limit", limit)


def lower(fn: Callable[..., Any], args: tuple[Any, ...], platforms: Sequence[str]) -> jax_export.Exported:
    """``fn`` lowered for ``platforms``, its launches of kernels included; arguments and errors as in :func:`export`."""
    function = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    checks = [jax_export.DisabledSafetyCheck.custom_call(ascend.TARGET)]
    try:
        with _without_source_locations():
            donated = [info.donated for info in jax.tree.leaves(function.trace(*args).args_info)]
            donates = any(donated) and ascend.PLATFORM in platforms
            if donates and len(platforms) > 1:
                raise errors.UnsupportedError(
                    f"the function donates arguments, which one module cannot say for {platforms=} at once: export "
                    "a bundle for each platform, or without donate_argnums"
                )
            with warnings.catch_warnings():
                if donates:  # JAX's list of platforms that take donations is closed, so it leaves them out and says so
                    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                exported = jax_export.export(function, platforms=tuple(platforms), disabled_checks=checks)(*args)
            return _with_donations(exported, donated) if donates else exported
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            raise
        raise errors.UnsupportedError(
            "the function cannot be exported, because it calls back into Python, which a bundle does not hold: remove "
            "jax.debug.print, jax.pure_callback, custom_partitioning and the like, or put them outside the function"
        ) from error


def _with_donations(exported: jax_export.Exported, donated: Sequence[bool]) -> jax_export.Exported:
    """``exported`` with the attributes by which XLA shares buffers of donated arguments with results.

    On one device each argument names its result (``tf.aliasing_output``); on several, where XLA decides how results are
    sharded, it is offered (``jax.buffer_donor``). Both are what JAX writes for its own platforms.
    """
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(exported.mlir_module())
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        given = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [()] * len(main.arguments)
        attributes = [{named.name: named.attr for named in attribute} for attribute in given]
        free = {index: (aval.shape, aval.dtype) for index, aval in enumerate(exported.out_avals)}
        for position, argument in enumerate(exported.module_kept_var_idx):
            if not donated[argument]:
                continue
            aval = exported.in_avals[argument]
            result = next((index for index, kind in free.items() if kind == (aval.shape, aval.dtype)), None)
            if exported.nr_devices > 1:
                attributes[position]["jax.buffer_donor"] = mlir.ir.BoolAttr.get(True)
            elif result is not None:
                del free[result]
                number = mlir.ir.IntegerAttr.get(mlir.ir.IntegerType.get_signless(32), result)
                attributes[position]["tf.aliasing_output"] = number
            else:
                warnings.warn(
                    f"argument {argument} is donated, and no result that is left has its type {aval.str_short()}: its "
                    "buffer is not used again",
                    stacklevel=4,
                )
        main.attributes["arg_attrs"] = mlir.ir.ArrayAttr.get([mlir.ir.DictAttr.get(a) for a in attributes])
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        shardy = jax.config.jax_use_shardy_partitioner
        serialized = jax_mlir.serialize_portable_artifact(module, version, shardy)
    return dataclasses.replace(exported, mlir_module_serialized=serialized)


def _custom_calls(module: mlir.ir.Module) -> list[mlir.ir.Operation]:
    """The launches of kernels in ``module``, in program order; valid as long as ``module`` is."""
    found = []

    def visit(operation: mlir.ir.Operation) -> mlir.ir.WalkResult:
        is_call = operation.name == "stablehlo.custom_call"
        if is_call and operation.attributes["call_target_name"].value == ascend.TARGET:
            found.append(operation)
        return mlir.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def launched(exported: jax_export.Exported) -> dict[str, Any]:
    """The manifest's entry of every kernel of the module, by its sha256.

    One source may be launched in several ways, since its shapes need not appear in it: the module says which.
    """
    kernels: dict[str, Any] = {}
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(exported.mlir_module())
        for operation in _custom_calls(module):
            made = cache.find(operation.attributes["mhlo.backend_config"]["kernel"].value)
            kernel = kernels.setdefault(
                made.sha, {"arch": made.arch, "entry": made.entry, "launches": [], "versions": made.versions}
            )
            launch = _launch(operation, made)
            if launch not in kernel["launches"]:
                kernel["launches"].append(launch)
    return kernels


def _launch(operation: mlir.ir.Operation, made: artifact.Artifact) -> dict[str, Any]:
    """The manifest's entry of one custom call of the kernel ``made``."""
    config = operation.attributes["mhlo.backend_config"]
    arguments = sorted(made.arguments, key=lambda argument: argument.output)  # operands, then results
    shapes = [mlir.ir.RankedTensorType(value.type).shape for value in (*operation.operands, *operation.results)]
    return {name: config[name].value for name in ("block_dim", "dynamic_ub_bytes", "workspace_bytes")} | {
        "arguments": [
            {"name": argument.name, "dtype": argument.dtype, "output": argument.output, "shape": list(shape)}
            for argument, shape in zip(arguments, shapes, strict=True)
        ],
        "launch_order": list(mlir.ir.DenseIntElementsAttr(config["launch_order"])),
    }


# --- the manifest --------------------------------------------------------------------------------------------------


def _manifest(exported: jax_export.Exported, kernels: dict[str, Any]) -> dict[str, Any]:
    return {
        "abi": ascend.ABI,
        "custom_call": ascend.TARGET,
        "format": FORMAT,
        "function": {
            "devices": exported.nr_devices,
            "inputs": _signature("args", jax.tree_util.tree_unflatten(exported.in_tree, exported.in_avals)[0]),
            "name": exported.fun_name,
            "outputs": _signature("result", jax.tree_util.tree_unflatten(exported.out_tree, exported.out_avals)),
            "platforms": list(exported.platforms),
        },
        "kernels": kernels,
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jaxlib")}
        | {"calling_convention": exported.calling_convention_version},
    }


def _signature(name: str, avals: Any) -> list[dict[str, Any]]:
    """Path, shape and dtype of every leaf of the tree ``avals``, called ``name``."""
    return [
        {
            "dtype": str(aval.dtype),
            "path": name + jax.tree_util.keystr(path),
            "shape": [size if isinstance(size, int) else str(size) for size in aval.shape],
        }
        for path, aval in jax.tree_util.tree_leaves_with_path(avals)
    ]


# --- the folder ----------------------------------------------------------------------------------------------------


def _write(path: pathlib.Path, files: dict[str, bytes]) -> None:
    """Makes ``path`` a folder of exactly ``files``; a reader sees the old folder or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as staging:
        new, old = pathlib.Path(staging, "new"), pathlib.Path(staging, "old")
        (new / "kernels").mkdir(parents=True)
        for name, content in sorted(files.items()):
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_bytes(content)
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
