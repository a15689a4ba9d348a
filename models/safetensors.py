"""Reads and writes tensors in the safetensors format, whole files or slices of a tensor, as NumPy arrays.

A file is the length of a header (8 bytes, little endian), the header (JSON: dtype, shape and place of each tensor), and
the tensors' bytes in row-major order (https://github.com/huggingface/safetensors). Reading maps files into memory, so a
slice costs what it holds; bfloat16 and 8-bit floats are the types of ``ml_dtypes``, which the format's own NumPy reader
does not have.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PART_OF_SEVERAL = "model-?????-of-?????.safetensors"

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


_LONGEST_HEADER = 100_000_000  # bytes; the format's own library reads no longer one
_LFS_POINTER = b"version https://git-lfs"  # the first line of what stands in for a file that was not fetched


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder, by name: memory-mapped arrays, which read what is sliced out of them.

    Where there is an index, a tensor is what the file that the index names for it holds, and what the index does not
    name is no tensor of the checkpoint.

    Args:
      path: a folder with ``model.safetensors``, or with several files and ``model.safetensors.index.json``.

    Raises:
      FileNotFoundError: there are no such files, or not all that the index names.
      ValueError: a file or the index is damaged, or only stands in for what Git LFS has; the index names a file outside
        of the folder, or a tensor that its file does not hold.
    """

    def __init__(self, path: pathlib.Path):
        if not (path / INDEX).exists():
            if not (path / SINGLE).exists():
                raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}: pass the folder of a model")
            self._arrays = _mapped(path / SINGLE)
            return
        place = _weight_map(path / INDEX)
        files = {file: path / file for file in sorted(set(place.values()))}
        if missing := [file for file, whole in files.items() if not whole.exists()]:
            raise FileNotFoundError(
                f"{len(missing)} of the {len(files)} files that {path / INDEX} names are missing, the first one "
                f"{missing[0]}: fetch them, too"
            )
        held = {file: _mapped(whole) for file, whole in files.items()}
        if absent := [name for name, file in place.items() if name not in held[file]]:
            raise ValueError(
                f"{path / INDEX}: {len(absent)} of {len(place)} tensors are not in the file that it names, among them "
                f"{absent[0]} in {place[absent[0]]}: it is not the index of these files"
            )
        self._arrays = {name: held[file][name] for name, file in place.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object that a JSON file of a model holds.

    Raises:
      ValueError: it holds no object, or only stands in for what Git LFS has.
    """
    return _parsed(path.read_bytes(), path)


def _parsed(text: bytes, path: pathlib.Path, what: str = "the file") -> dict[str, Any]:
    if text.startswith(_LFS_POINTER):
        raise _pointer(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path}: {what} is no JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {what} holds a {type(value).__name__}, expected an object; fetch the file again")
    return value


def _pointer(path: pathlib.Path) -> ValueError:
    return ValueError(f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder")


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    """The file that each tensor is in, by the index ``path``."""
    place = read_json(path).get("weight_map")
    if not isinstance(place, dict) or not all(isinstance(file, str) for file in place.values()):
        raise ValueError(f"{path}: weight_map is no object that says for each tensor which file it is in")
    for name, file in place.items():
        inside = pathlib.PurePath(file)
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{path}: {name} is said to be in {file!r}, outside of the folder; that is not read")
    return place


def _mapped(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, mapped into memory.

    Raises:
      ValueError: the file is not what the format prescribes: cut off, a header that does not describe its bytes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if _LFS_POINTER.startswith(first) and size >= 8:
            raise _pointer(path)
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(
                f"{path} has {size} bytes, and its header {length} of at most {_LONGEST_HEADER}, as it says: it is "
                "cut off, or no safetensors file; fetch it again"
            )
        header = _parsed(file.read(length), path, "the header")
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        end = _checked(path, name, entry, end)
    if end != size - 8 - length:
        raise ValueError(
            f"{path} has {size - 8 - length} bytes of tensors, and its header describes {end}: it is cut off, or has "
            "something behind its end; fetch it again"
        )
    # Nothing cannot be mapped.
    data = np.memmap(path, np.uint8, mode="r", offset=8 + length) if end else np.zeros(0, np.uint8)
    return {
        name: data[slice(*entry["data_offsets"])].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def _offsets(path: pathlib.Path, name: str, entry: Any) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end, if its entry in the header has the right form."""
    known = entry.keys() >= {"dtype", "shape", "data_offsets"} if isinstance(entry, dict) else False
    if not known or not _sizes(entry["shape"]) or not _sizes(entry["data_offsets"]) or len(entry["data_offsets"]) != 2:
        raise ValueError(
            f"{path}: the header says {entry!r} of {name}, expected a dtype, a shape and two data_offsets; fetch the "
            "file again"
        )
    return tuple(entry["data_offsets"])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _checked(path: pathlib.Path, name: str, entry: dict[str, Any], expected: int) -> int:
    """Where the bytes of a tensor end, if they begin at ``expected``, where the one before it ends, and are enough."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: tensors of {entry['dtype']}, such as {name}; known are {', '.join(_DTYPES)}")
    begin, end = entry["data_offsets"]
    needed = math.prod(entry["shape"]) * np.dtype(_DTYPES[entry["dtype"]]).itemsize
    if begin != expected or end - begin != needed:
        raise ValueError(
            f"{path}: {name}, {entry['dtype']} {entry['shape']}, should have {needed} bytes from {expected} on; the "
            f"header says {begin} to {end}. Fetch the file again"
        )
    return end


def save(path: pathlib.Path, tensors: Iterable[tuple[str, np.ndarray]], max_file_bytes: int) -> None:
    """Writes tensors into the folder ``path``: into one file if they fit, else into several with an index.

    An index and files of an earlier checkpoint there, under the names that these have, are removed: a reader would take
    them for this one's.

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
    for old in (path / INDEX, path / SINGLE, *path.glob(_PART_OF_SEVERAL)):
        old.unlink(missing_ok=True)
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
