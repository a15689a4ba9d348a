"""Weights in fp8 with a scale for each block of a matrix, as DeepSeek-V3 is published: read and multiplied out.

The scales of ``name`` are the tensor ``name_scale_inv``, by which it is multiplied: float32, or powers of two in 8
bits. How large a block is stands in ``config.json``, under ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from glass_jax import errors

SUFFIX = "_scale_inv"

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_SCALES = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu)))
_FLOATS = tuple(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
_PUBLISHED = [128, 128]  # rows and columns of a block where config.json does not say


def block_of(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, by what ``config.json`` says.

    Raises:
      UnsupportedError: weights that are quantized in another way.
    """
    quantization = raw.get("quantization_config") or {}
    method, block = quantization.get("quant_method", "fp8"), quantization.get("weight_block_size", _PUBLISHED)
    if method != "fp8":
        raise errors.UnsupportedError(
            f"config.json: quantization_config has quant_method={method!r}; fp8 with a scale for each block can be "
            "read. Use the model's weights as they were before"
        )
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise errors.UnsupportedError(
            f"config.json: quantization_config has weight_block_size={block!r}; rows and columns of a block, such as "
            f"{_PUBLISHED}, can be read"
        )
    return tuple(block)


def problems(tensors: Mapping[str, np.ndarray], name: str, block: tuple[int, int]) -> Iterator[str]:
    """What is wrong with the type of the tensor ``name`` and with its scales."""
    value, scale = tensors[name], tensors.get(name + SUFFIX)
    if value.dtype not in (*_FP8, *_FLOATS):
        yield f"{name} is {value.dtype}, expected floats"
    elif value.dtype not in _FP8:
        if scale is not None:
            yield f"{name} is {value.dtype} and has scales, {name}{SUFFIX}, which only fp8 weights have"
    elif scale is None:
        yield f"{name} is {value.dtype} and its scales, {name}{SUFFIX}, are missing"
    elif value.ndim != 2:
        yield f"{name} is {value.dtype} and no matrix: {value.shape}"
    elif scale.dtype not in _SCALES:
        yield f"{name}{SUFFIX} is {scale.dtype}, expected float32 or float8_e8m0fnu"
    elif scale.shape != (expected := tuple(-(-size // per) for size, per in zip(value.shape, block, strict=True))):
        yield (
            f"{name}{SUFFIX} is {scale.shape}, expected {expected}: one for each block of {block[0]} by {block[1]} of "
            f"{value.shape}"
        )


def read(tensors: Mapping[str, np.ndarray], name: str, index: tuple[slice, ...], block: tuple[int, int]) -> np.ndarray:
    """The part ``index`` of a tensor; of one in fp8, float32, multiplied by its blocks' scales."""
    value = tensors[name][index]
    if value.dtype not in _FP8:
        return value
    rows, columns = (
        np.arange(size)[each] // per for size, each, per in zip(tensors[name].shape, index, block, strict=True)
    )
    return value.astype(np.float32) * tensors[name + SUFFIX][np.ix_(rows, columns)].astype(np.float32)
