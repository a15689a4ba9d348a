"""Programs as JSON: :func:`to_json` and :func:`from_json` are inverse to each other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from glass_jax.hw.ir import program as ir

_NODES = {
    cls.__name__: cls
    for cls in (
        ir.Const, ir.Var, ir.Load, ir.Binary, ir.Cast, ir.Select, ir.Call, ir.Address, ir.Register,
        ir.Buffer, ir.Region, ir.Program,
        ir.For, ir.While, ir.If, ir.Let, ir.Store, ir.Copy, ir.Gemm, ir.Fill, ir.Simt, ir.Simd, ir.Section, ir.Op,
    )
}  # fmt: skip


def _default(field: dataclasses.Field) -> Any:
    """What a field left out of the text holds: its default, or an empty tuple."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return () if field.default is dataclasses.MISSING else field.default


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    default = _default(field)
    return type(value) is type(default) and value == default


def _encode(value: Any) -> Any:
    if isinstance(value, ir.Space):
        return {"@": "Space", "value": value.value}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        kept = [f.name for f in dataclasses.fields(value) if not _is_default(f, fields[f.name])]
        return {"@": type(value).__name__} | {name: _encode(fields[name]) for name in kept}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"@": "float", "value": repr(value)}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    tag = value.get("@")
    fields = {key: _decode(item) for key, item in value.items() if key != "@"}
    if tag == "Space":
        return ir.Space(fields["value"])
    if tag == "float":
        return float(fields["value"])
    if tag is None:
        return fields
    cls = _NODES[tag]
    return cls(**{field.name: _default(field) for field in dataclasses.fields(cls)} | fields)


def to_json(program: ir.Program) -> str:
    """``program`` as JSON text, deterministic."""
    return json.dumps(_encode(program), separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> ir.Program:
    """The program that :func:`to_json` wrote."""
    return _decode(json.loads(text))
