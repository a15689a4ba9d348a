"""Files of tensors: what comes back, what is refused, and that others read them."""

import json

import ml_dtypes
import numpy as np
import pytest

from models import safetensors
from models.safetensors import Checkpoint


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "int64", "bool"])
def test_tensors_come_back(tmp_path, dtype):
    value = np.arange(12).reshape(3, 4).astype(dtype)
    safetensors.save(tmp_path, [("a", value), ("none", value[:0]), ("scalar", value[1, 2])], 10**9)
    tensors = Checkpoint(tmp_path)
    assert len(tensors) == 3
    np.testing.assert_array_equal(tensors["a"][1:, 2:], value[1:, 2:])
    assert tensors["a"].dtype == np.dtype(dtype)
    assert tensors["none"].shape == (0, 4)
    assert tensors["scalar"].shape == ()


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4302330480\n"
DAMAGED = {
    "lfs pointer": (POINTER, "is a pointer of Git LFS, not the file itself: run `git lfs pull`"),
    "empty": (b"", "has 0 bytes"),
    "cut off in the header": (file_of({"a": entry(0, 4)}, b"1234")[:20], "has 20 bytes, and its header"),
    "cut off in a tensor": (file_of({"a": entry(0, 4)}, b"123"), "has 3 bytes of tensors, and its header describes 4"),
    "more behind the end": (file_of({"a": entry(0, 4)}, b"12345"), "has 5 bytes of tensors"),
    "header of an exabyte": ((1 << 60).to_bytes(8, "little") + b"{}", "its header 1152921504606846976 of at most"),
    "no JSON": (file_of(b"{'a'}"), "the header is no JSON"),
    "no text": (file_of(b"\xff\xfe"), "the header is no JSON"),
    "too deep": (file_of(b"[" * 200_000), "the header is no JSON"),
    "no object": (file_of([1]), "the header holds a list"),
    "no entry": (file_of({"a": 3}), "the header says 3 of a"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"), "of a, expected a dtype, a shape"),
    "negative size": (file_of({"a": entry(0, 4, shape=(-1, -1))}, b"1234"), "of a, expected a dtype, a shape"),
    "other size": (file_of({"a": entry(0, 8)}, b"12345678"), "should have 4 bytes from 0 on; the header says 0 to 8"),
    "a hole": (file_of({"a": entry(4, 8)}, b"12345678"), "should have 4 bytes from 0 on; the header says 4 to 8"),
    "twice the same bytes": (file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "should have 4 bytes from 4 on"),
    "beyond the end": (
        file_of({"a": entry(0, 1 << 62, shape=(1 << 60,))}, b"1234"),
        "its header describes 46116",
    ),
    "unknown type": (file_of({"a": entry(0, 1, "F4")}, b"1"), "tensors of F4, such as a; known are"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(tmp_path, data, message):
    (tmp_path / safetensors.SINGLE).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


def several(path, index, **files):
    """A folder with an index, and in each file the tensors of its dictionary."""
    for name, tensors in files.items():
        safetensors.save(path, tensors.items(), 10**9)
        (path / safetensors.SINGLE).rename(path / f"{name}.safetensors")
    (path / safetensors.INDEX).write_text(json.dumps({"weight_map": index}))


def test_the_index_is_obeyed(tmp_path):
    """A tensor that stands in two files comes from the one that the index names; what it does not name is not read."""
    first, second = np.ones(3, np.float32), np.zeros(3, np.float32)
    files = {"x": {"a": first, "b": second}, "y": {"a": second, "b": first, "c": first}}
    several(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, **files)
    tensors = Checkpoint(tmp_path)
    assert set(tensors) == {"a", "b"}
    np.testing.assert_array_equal(tensors["a"], first)
    np.testing.assert_array_equal(tensors["b"], first)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "../x.safetensors"}, "outside of the folder"),
        ({"a": "/x.safetensors"}, "outside of the folder"),
        ({"a": 3}, "weight_map is no object"),
        (["a"], "weight_map is no object"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "1 of 2 tensors .* among them b in x.safetensors"),
    ],
    ids=["up", "absolute", "no name", "no object", "not there"],
)
def test_an_index_that_does_not_fit(tmp_path, index, message):
    several(tmp_path, index, x={"a": np.ones(3)})
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)
    several(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": np.ones(3)})
    with pytest.raises(FileNotFoundError, match=r"1 of the 2 files .* the first one y\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("sizes", [(8, 10**9), (10**9, 8)], ids=["several, then one", "one, then several"])
def test_a_folder_that_is_written_again(tmp_path, sizes):
    """What is read is the checkpoint that was written last, whatever an earlier one left; by others' readers, too."""
    for value, size in enumerate(sizes):
        safetensors.save(tmp_path, [(name, np.full(2, value, np.float32)) for name in "abc"], size)
    assert all(np.all(tensor == 1) for tensor in Checkpoint(tmp_path).values())
    names = {path.name for path in tmp_path.iterdir()}
    assert (safetensors.SINGLE in names) != (safetensors.INDEX in names)


def test_the_formats_own_library_reads_them(tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="the safetensors package comes with glass_jax[parity]")
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.save(tmp_path, [("a", value), ("b", value.T)], 10**9)
    tensors = library.load_file(tmp_path / safetensors.SINGLE)
    np.testing.assert_array_equal(tensors["a"], value)
    np.testing.assert_array_equal(tensors["b"], value.T)
