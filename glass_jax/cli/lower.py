"""``glass lower``: a kernel as a program, as Ascend C, and against the limits of a chip."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from glass_jax import config, errors, verification
from glass_jax.cli import files
from glass_jax.hw import chips, memory, verifier
from glass_jax.hw.ir import printer
from glass_jax.lowering import artifact, collect
from glass_jax.primitives.gemm import ACTIVATIONS, gemm

SUMMARY = "Generate a kernel's Ascend C, or show and verify what it does."

_DTYPES = ("float32", "float16", "bfloat16", "int8", "int32", "float8_e4m3fn", "float8_e5m2")
_VIOLATIONS = 1  # exit code of --verify and --run when they find something

_DESCRIPTION = """\
Generates the Ascend C of a kernel and prints it, with no NPU and no CANN.

KERNEL is an operation of glass_jax ({operations}), whose shapes and types the options
give, or FILE:NAME, a TileLang kernel in a Python file: a @T.prim_func, a @tilelang.jit
function, or a function that returns a @T.prim_func. The arguments of a function
follow as key=value."""

_EXAMPLES = """\
examples:
  {prog} gemm --m 4096 --n 7168 --k 2048 --dtype bfloat16
  {prog} gemm --dtype float16 --bias --activation gelu --dry-run
  {prog} gemm --verify --target 910B3
  {prog} gemm --target 950PR --output build/
  {prog} kernels.py:add --dry-run
  {prog} kernels.py:matmul M=1024 N=1024 block=128 --verify

exit codes: 0 done, 1 --verify or --run found violations, 2 the command cannot be carried out"""


def help_text(prog: str) -> dict[str, Any]:
    """Keyword arguments of the parser: description, examples, and lines kept as they are."""
    return {
        "description": _DESCRIPTION.format(operations=", ".join(_OPERATIONS)),
        "epilog": _EXAMPLES.format(prog=prog),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Makes ``parser`` the parser of ``glass lower``."""
    parser.set_defaults(command=_run)
    parser.add_argument("kernel", metavar="KERNEL", help=f"one of {', '.join(_OPERATIONS)}, or FILE:NAME")
    parser.add_argument("arguments", metavar="KEY=VALUE", nargs="*", help="arguments of the function FILE:NAME")
    parser.add_argument(
        "--target", metavar="CHIP", help="the chip (default: GLASS_CHIP, else 950DT); glass doctor lists them"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the program and its memory map, write nothing")
    parser.add_argument(
        "--verify", action="store_true", help="check against the chip's limits; exit code 1 if any is broken"
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="execute the generated code on this machine, on made-up operands, under several orders of its pipes; exit "
        "code 1 if it goes wrong",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=pathlib.Path, help="write NAME.asc and NAME.json (how to launch it) here"
    )

    shape = parser.add_argument_group("shape and types of an operation")
    shape.add_argument("--batch", type=_extent, help="leading dimension of both operands (default: none)")
    for name in "mnk":
        shape.add_argument(f"--{name}", type=_extent, help="extent (default: 1024)")
    shape.add_argument("--dtype", choices=_DTYPES, help="type of the operands (default: bfloat16)")
    shape.add_argument("--out-dtype", choices=_DTYPES, help="type of the result (default: the operation's own)")
    shape.add_argument("--bias", action="store_true", help="add a bias")
    shape.add_argument("--activation", choices=[name for name in ACTIVATIONS if name], help="activation of the result")
    shape.add_argument("--transpose-rhs", action="store_true", help="the right operand is [N, K]")


def _extent(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


# --- what to lower -------------------------------------------------------------------------------------------------


def _gemm(args: argparse.Namespace) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """``gemm`` with the options of ``args``, and its operands."""
    m, n, k = (getattr(args, name) or 1024 for name in "mnk")
    dtype = jnp.dtype(args.dtype or "bfloat16")
    batch = (args.batch,) if args.batch else ()
    operands = [
        jax.ShapeDtypeStruct((*batch, m, k), dtype),
        jax.ShapeDtypeStruct((*batch, n, k) if args.transpose_rhs else (*batch, k, n), dtype),
    ]
    if args.bias:
        operands.append(jax.ShapeDtypeStruct((n,), jnp.int32 if dtype == jnp.int8 else jnp.float32))

    def fn(lhs, rhs, bias=None):
        options = {"activation": args.activation, "transpose_rhs": args.transpose_rhs}
        return gemm(lhs, rhs, bias=bias, preferred_element_type=args.out_dtype, **options)

    return fn, operands


_OPERATIONS = {"gemm": _gemm}
_SHAPE_OPTIONS = ("batch", "m", "n", "k", "dtype", "out_dtype", "bias", "activation", "transpose_rhs")


def _kernels(args: argparse.Namespace, chip: str) -> tuple[collect.Found, ...]:
    """The kernels that the command line names, for ``chip``."""
    if args.kernel in _OPERATIONS:
        if args.arguments:
            raise errors.GlassError(f"{args.kernel} takes options such as --m, not {' '.join(args.arguments)}")
        fn, operands = _OPERATIONS[args.kernel](args)
        return collect.find(fn, *operands, chip=chip)
    file, separator, name = args.kernel.rpartition(":")
    if not separator:
        known = ", ".join(_OPERATIONS)
        raise errors.GlassError(
            f"{args.kernel!r} is neither an operation ({known}) nor FILE:NAME, a kernel in a Python file"
        )
    if given := [f"--{option.replace('_', '-')}" for option in _SHAPE_OPTIONS if getattr(args, option)]:
        raise errors.GlassError(f"{', '.join(given)} describe an operation; {args.kernel} takes key=value")
    return collect.find(files.load(file, name, files.keywords(args.arguments)), chip=chip)


# --- what to do with it --------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    chip = chips.get(args.target or config.current().chip)
    generating = not args.dry_run and (args.output is not None or not (args.verify or args.run))
    kernels = _kernels(args, chip.name if generating else collect.stand_in(chip))
    if args.dry_run:
        print("\n\n".join(_report(kernel, chip) for kernel in kernels))
    # Both, so that a kernel with several faults is told of all.
    if sum([args.verify and _verify(kernels, chip), args.run and _executed(kernels)]):
        return _VIOLATIONS
    if generating and args.output is not None:
        for kernel in kernels:
            _write(kernel.compiled(), args.output)
    elif generating:
        print("\n".join(kernel.compiled().source for kernel in kernels))
    return 0


def _report(kernel: collect.Found, chip: chips.Chip) -> str:
    """The program and its memory map on ``chip``."""
    allocations = verifier.memory_of(kernel.program, chip, kernel.memory)
    note = f" (upper bound: {kernel.refusal})" if kernel.refusal else ""
    return f"{printer.text(kernel.program)}\n\nmemory of {chip.name}{note}\n{memory.memory_map(allocations, chip)}"


def _verify(kernels: tuple[collect.Found, ...], chip: chips.Chip) -> bool:
    """Prints what ``chip`` cannot take in the kernels; whether there is anything."""
    found = verification.violations(kernels, chip)
    for violation in found:
        print(violation)
    names = ", ".join(kernel.program.name for kernel in kernels)
    written = "" if chip.has_generator else f" (as written for {collect.REFERENCE_CHIP})"
    print(f"{names} on {chip.name}{written}: violations: {len(found)} ({len(verifier.RULES)} rules)")
    return bool(found)


def _executed(kernels: tuple[collect.Found, ...]) -> bool:
    """Prints what goes wrong when the generated code is executed; whether anything does."""
    from glass_jax.lowering.host import check, launch

    found = [violation for kernel in kernels for violation in check.of_kernel(kernel.compiled())]
    for violation in found:
        print(violation)
    names = ", ".join(kernel.compiled().entry for kernel in kernels)
    orders = ", ".join(policy.name for policy in launch.POLICIES)
    print(f"{names} executed on this machine ({orders}): violations: {len(found)}")
    return bool(found)


def _write(made: artifact.Artifact, folder: pathlib.Path) -> None:
    """Writes the source of a kernel and how to launch it."""
    folder.mkdir(parents=True, exist_ok=True)
    launch = {
        name: getattr(made, name) for name in ("entry", "arch", "block_dim", "dynamic_ub_bytes", "workspace_bytes")
    }
    launch |= {"launch_order": made.launch_order, "sha256": made.sha, "versions": made.versions}
    launch["arguments"] = [dataclasses.asdict(argument) for argument in made.arguments]
    source, manifest = (folder / f"{made.program.name}{suffix}" for suffix in (".asc", ".json"))
    source.write_text(made.source)
    manifest.write_text(json.dumps(launch, indent=2, sort_keys=True) + "\n")
    print(f"wrote {source} and {manifest}")
