"""Reads and writes tensors in the safetensors format, whole files or slices of a tensor, as NumPy arrays.

A file is the length of a header (8 bytes, little endian), the header (JSON: dtype, shape and place of each tensor), and
the tensors' bytes in row-major order (https://github.com/huggingface/safetensors). Reading maps files into memory, so a
slice costs what it holds; bfloat16 and 8-bit floats are the types of ``ml_dtypes``, which the format's own NumPy reader
does not have.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder, by name: memory-mapped arrays, which read what is sliced out of them.

    Args:
      path: a folder with ``model.safetensors``, or with several files and ``model.safetensors.index.json``.

    Raises:
      FileNotFoundError: there are no such files.
    """

    def __init__(self, path: pathlib.Path):
        self._arrays: dict[str, np.ndarray] = {}
        if (path / INDEX).exists():
            files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        else:
            files = [SINGLE]
        for file in files:
            self._arrays |= _mapped(path / file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _mapped(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, mapped into memory."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if unknown := {entry["dtype"] for entry in header.values()} - set(_DTYPES):
        raise ValueError(f"{path}: tensors of {', '.join(sorted(unknown))}; known are {', '.join(_DTYPES)}")
    empty = path.stat().st_size == 8 + length  # which cannot be mapped
    data = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r", offset=8 + length)
    return {
        name: data[slice(*entry["data_offsets"])].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def save(path: pathlib.Path, tensors: Iterable[tuple[str, np.ndarray]], max_file_bytes: int) -> None:
    """Writes tensors into the folder ``path``: into one file if they fit, else into several with an index.

    Args:
      path: an existing folder.
      tensors: names and values; as many at a time are in memory as go into one file.
      max_file_bytes: tensors' bytes in a file; one larger than that is in a file of its own.
    """
    files: list[list[str]] = []  # names of the tensors in each
    for batch in _batches(tensors, max_file_bytes):
        _write(path / f"part-{len(files)}", batch)
        files.append(list(batch))
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    for i, name in enumerate(names):
        (path / f"part-{i}").rename(path / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, batch in zip(names, files, strict=True) for tensor in batch}
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def _batches(tensors: Iterable[tuple[str, np.ndarray]], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """``tensors`` in their order, as many at a time as have ``max_bytes`` together; at least one batch."""
    batch, size = {}, 0
    for name, value in tensors:
        if batch and size + value.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = value
        size += value.nbytes
    yield batch


def _write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())
