"""Generated Ascend C as a C++ translation unit for this machine: a change of text, line by line.

What the runtime's headers cannot do by themselves: regions of vector code are called when the vector pipe's turn comes,
pointers into UB are real ones, elements that scalar code and threads read and write go through checks, and every
statement says on which line it stands. Lines stay where they are, so that the compiler's errors and the runtime's
findings name those of the source as TileLang wrote it.
"""

from __future__ import annotations

import re

from glass_jax.errors import UnsupportedError

_ENTRY = re.compile(r'extern "C" __global__ (__cube__|__vector__|__mix__\(\d, \d\)) void (\w+)\((.*?)\) \{')
_REGION = re.compile(r"^__simd_vf__ inline void (\w+)\(", re.MULTILINE)
_FUNCTION = re.compile(r'^(?:__simd_vf__|__simt_vf__|extern "C" __global__).*\((.*)\) \{$')
_TEMPLATE_REGION = re.compile(r"(?<![:\w])(ascend_nd2nz_scatter<[^;(]*>)\(")
_UB_BASE = re.compile(r"\(__ubuf__ (\w+) ?\*\)0;")
_GLOBAL_POINTER = re.compile(r"__gm__ [\w ]+?\* ?(\w+)")
_UB_ELEMENT = re.compile(r"(?<!&\()\((\(__ubuf__ [\w ]+\*\))(\w+)\)\[")
_VECTOR_ELEMENT = re.compile(r"\*\(__(?:gm|ubuf)__ ([\w ]+?) ?\*\)\(")
_STATEMENT = re.compile(r"^(\s+)(?!for\b|if\b|while\b|else\b|return\b|break\b|continue\b|case\b|#|\})(?=.*\().*;$")

# What a compiler or linker says of a call that the runtime does not have, or not for these types: gcc's words, clang's.
_MISSING = re.compile(
    r"error: [‘'](?P<undeclared>[\w:]+)[’'] (?:was not declared|has not been declared|is not a member)"
    r"|error: use of undeclared identifier '(?P<unknown>\w+)'"
    r"|error: no matching function for call to [‘'](?P<unmatched>[\w:]+)"
    r"|error: static assertion failed(?: due to requirement '[^']*')?: (?P<refused>the runtime .*)"
    r"|undefined reference to [`'](?P<undefined>[^']+)'"
    r"|undefined symbol: (?P<symbol>[^\n]+)"
)

BLOCKS_TOGETHER = "asc_sync_inter_"
BLOCKS_IN_ORDER = re.compile(r"\basc_(?:set_)?atomic_")


def translation_unit(source: str, file: str = "kernel.asc") -> str:
    """The C++ of a generated kernel for this machine, to be compiled against the runtime's ``kernel.h``.

    Args:
      source: what TileLang generated.
      file: how the compiler shall call it in its messages.

    Raises:
      UnsupportedError: the source holds no kernel of the kind that TileLang generates.
    """
    entry = _ENTRY.search(source)
    if entry is None:
        raise UnsupportedError(
            'the source has no function declared extern "C" __global__ with __cube__, __vector__ or __mix__: it is not '
            "what TileLang generates for the 950, and cannot run on this machine"
        )
    kind, name, parameters = entry.groups()
    regions = "|".join(map(re.escape, _REGION.findall(source)))
    called_region = re.compile(rf"(?<![\w:&])({regions})\(\s*") if regions else None
    lines: list[str] = []
    pointers: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        function = _FUNCTION.match(line)
        if function is not None:
            pointers = _GLOBAL_POINTER.findall(function.group(1))
            lines.append(line)
        else:
            lines.append(_statement(line, number, pointers, called_region))
    cube, vector = kind != "__vector__", kind != "__cube__"
    together = BLOCKS_TOGETHER in source
    ordered = BLOCKS_IN_ORDER.search(source) is not None
    flags = ", ".join(str(flag).lower() for flag in (cube, vector, together, ordered))
    return "\n".join(
        [
            '#include "kernel.h"',
            f'#line 1 "{file}"',
            *lines,
            f"static void glass_entry(void* const* arguments) {{ {name}({_arguments(parameters)}); }}",
            '__attribute__((visibility("default"))) int glass_host_launch(const GlassHostLaunch* launch) {',
            f'  return glass::run_kernel(launch, {{"{name}", {flags}, glass_entry}});',
            "}",
            "",
        ]
    )


def missing_call(messages: str, file: str = "kernel.asc") -> tuple[str, int] | None:
    """The first call, by its name, that a kernel makes and the runtime does not have.

    Args:
      messages: what the compiler or the linker wrote when it failed.
      file: what :func:`translation_unit` called the source.

    Returns:
      The name, or the sentence of a check in the runtime's headers, and the line of the source that makes the call (0
      where the messages do not tell, as a linker's); None if the messages are about something else.
    """
    found = _MISSING.search(messages)
    if found is None:
        return None
    name = next(filter(None, found.groups()))
    name = re.sub(r"^.*?\bglass::(\w+(?:<[^(]*>)?)\(.*", r"\1", name)  # of a function's whole declaration
    # A call out of a template is reported there; the line of the source that led to it stands nearby.
    lines = [(abs(at.start() - found.start()), int(at[1])) for at in re.finditer(rf"{re.escape(file)}:(\d+)", messages)]
    return name, min(lines)[1] if lines else 0


def _statement(line: str, number: int, pointers: list[str], called_region: re.Pattern[str] | None) -> str:
    """A line of a function's body with its calls and accesses adapted."""
    if called_region is not None:
        line = called_region.sub(r'glass::Deferred<\1>::record("\1", ', line).replace(", )", ")")
    line = _TEMPLATE_REGION.sub(r'glass::Deferred<\1>::record("ascend_nd2nz_scatter", ', line)
    line = _UB_BASE.sub(r"(\1*)glass::ub_base();", line)
    line = _UB_ELEMENT.sub(r"glass::elements(\1\2)[", line)
    line = _VECTOR_ELEMENT.sub(r"*glass::elements_of<\1>(", line)
    for pointer in pointers:
        line = re.sub(rf"(?<![\w.])(?<!&\(){pointer}\[", f"glass::elements({pointer})[", line)
    statement = _STATEMENT.match(line)
    if statement is None:
        return line
    indent = statement.group(1)
    return f"{indent}glass_line = {number}; {line[len(indent) :]}"


def _arguments(parameters: str) -> str:
    """The arguments of a kernel out of an array of pointers: a pointer itself, a scalar by what it points to."""
    arguments = []
    for index, parameter in enumerate(filter(None, (p.strip() for p in parameters.split(",")))):
        declared = re.sub(r"\s*\w+$", "", parameter.replace("__gm__", "").replace("__restrict__", "")).strip()
        pointer = declared.endswith("*")
        arguments.append(f"({declared})arguments[{index}]" if pointer else f"*(const {declared}*)arguments[{index}]")
    return ", ".join(arguments)
