"""safetensors files: those of the format's own library are read, those that lie are refused."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.safetensors import open_safetensors

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def save(tmp_path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header: JSON of a value, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("kind", DTYPES)
def test_every_type(tmp_path: Path, kind: str) -> None:
    dtype = np.dtype(DTYPES[kind])
    values = np.arange(6).reshape(2, 3).astype(dtype)
    raw = values.tobytes()
    path = save(tmp_path, {"x": entry(kind, (2, 3), 0, len(raw))}, raw)
    tensor = open_safetensors(path).tensors["x"]
    assert (tensor.type, tensor.shape, tensor.nbytes) == (kind, (2, 3), len(raw))
    assert tensor.read().dtype == dtype
    assert tensor.read().tobytes() == tensor.raw().tobytes() == raw
    assert not tensor.read().flags.writeable


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6),
    kinds=st.lists(
        st.sampled_from([np.float32, np.float16, np.int64, np.uint8, np.bool_]), min_size=6
    ),
    note=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_agrees_with_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    kinds: list[type],
    note: dict[str, str],
) -> None:
    path = tmp_path_factory.mktemp("library") / "model.safetensors"
    rng = np.random.default_rng(len(shapes))
    arrays: dict[str, np.ndarray]
    arrays = {f"t{i}": rng.integers(0, 2, shape).astype(kinds[i]) for i, shape in enumerate(shapes)}
    safetensors.numpy.save_file(arrays, path, note or None)
    checkpoint = open_safetensors(path)
    assert checkpoint.metadata == note
    expected = safetensors.numpy.load_file(path)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, values in expected.items():
        found = checkpoint.tensors[name].read()
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        np.testing.assert_array_equal(found, values)


def test_aligned_data_is_not_copied(tmp_path: Path) -> None:
    raw = np.arange(4, dtype=np.float32).tobytes()
    header = json.dumps({"x": entry("F32", (4,), 0, 16)}).encode()
    for pad, copied in ((-len(header) % 8, False), (-len(header) % 8 + 1, True)):
        tensor = open_safetensors(save(tmp_path, header + b" " * pad, raw)).tensors["x"]
        assert np.shares_memory(tensor.read(), tensor.raw()) != copied
        assert tensor.read().flags.aligned
        np.testing.assert_array_equal(tensor.read(), np.arange(4))


def nested(depth: int) -> bytes:
    return b'{"x":' + b"[" * depth + b"]" * depth + b"}"


HEADERS = {
    "no object": (b"[]", b"", "start with '{'"),
    "no JSON": (b"{", b"", "not valid"),
    "two values": (b"{}{}", b"", "not valid"),
    "not UTF-8": (b'{"\xff":0}', b"", "not valid"),
    "UTF-16": ("{}".encode("utf-16-le"), b"", "not valid"),
    "constant": (b'{"x":NaN}', b"", "NaN is not JSON"),
    "same key": (b'{"x":{},"x":{}}', b"", "'x' is given twice"),
    "same key inside": (b'{"x":{"dtype":1,"dtype":1}}', b"", "'dtype' is given twice"),
    "nested": (nested(100_000), b"", "nested too deeply"),
    "digits": (b'{"x":' + b"9" * 5000 + b"}", b"", "not valid"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "strings to strings"),
    "metadata list": ({"__metadata__": []}, b"", "strings to strings"),
    "entry": ({"x": 3}, b"", "exactly dtype"),
    "missing": ({"x": {"dtype": "U8", "shape": []}}, b"", "exactly dtype"),
    "more": ({"x": entry() | {"stride": [1]}}, bytes(4), "exactly dtype"),
    "dtype": ({"x": entry("Q8")}, bytes(4), "unknown dtype 'Q8'"),
    "dtype list": ({"x": entry(["U8"])}, bytes(4), "bad dtype"),
    "F4": ({"x": entry("F4")}, bytes(4), "takes 2 bytes, data_offsets give 4"),
    "F6": ({"x": entry("F6_E2M3", [8])}, bytes(4), "takes 6 bytes, data_offsets give 4"),
    "negative": ({"x": entry("U8", [-4])}, bytes(4), "non-negative"),
    "bool": ({"x": entry("U8", [True], 0, 1)}, bytes(1), "non-negative"),
    "float": ({"x": entry("U8", [4.0])}, bytes(4), "non-negative"),
    "shape": ({"x": entry("U8", 4)}, bytes(4), "non-negative"),
    "overflow": ({"x": entry("U8", [2**32, 2**32])}, bytes(4), "too large"),
    "wraps to 4": ({"x": entry("U8", [2**62 + 1, 4])}, bytes(4), "too large"),
    "empty but huge": ({"x": entry("U8", [0, 2**62, 2**62], 0, 0)}, b"", "too large"),
    "dimensions": ({"x": entry("U8", [1] * 65, 0, 1)}, bytes(1), "too many dimensions"),
    "huge numbers": ({"x": entry("U8", [10**4000] * 1000)}, bytes(4), "too large"),
    "one offset": ({"x": entry() | {"data_offsets": [0]}}, bytes(4), "begin <= end"),
    "backwards": ({"x": entry("U8", [0], 4, 0)}, bytes(4), "begin <= end"),
    "size": ({"x": entry("F32")}, bytes(4), "takes 16 bytes, data_offsets give 4"),
    "outside": ({"x": entry()}, bytes(3), "cut short"),
    "far outside": ({"x": entry("U8", [4], 2**60, 2**60 + 4)}, bytes(4), "cut short"),
    "overlap": ({"x": entry(), "y": entry("U8", [4], 3, 7)}, bytes(7), "'y' overlaps"),
    "same place": ({"x": entry(), "y": entry()}, bytes(4), "'y' overlaps"),
    "hole": ({"x": entry(), "y": entry("U8", [1], 5, 6)}, bytes(6), "'y' follows a hole"),
    "hole first": ({"x": entry("U8", [4], 1, 5)}, bytes(5), "'x' follows a hole"),
    "rest": ({"x": entry()}, bytes(5), "1 bytes after the last tensor"),
}


@pytest.mark.parametrize(("header", "data", "reason"), HEADERS.values(), ids=HEADERS)
def test_header_that_disagrees_with_the_file(
    tmp_path: Path, header: Any, data: bytes, reason: str
) -> None:
    path = save(tmp_path, header, data)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_safetensors(path)
    assert time.process_time() - start < 2
    assert caught.value.path == path
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (2**64 - 1, "above the format's bound"),
        (100_000_001, "above the format's bound"),
        (100_000_000, "cut short"),
        (3, "cut short"),
        (0, "start with '{'"),
    ],
)
def test_wrong_header_length(tmp_path: Path, length: int, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_safetensors(save(tmp_path, b"{}", length=length))


@pytest.mark.parametrize(
    ("kind", "count"), [("F4", 8), ("I4", 7), ("U4", 8), ("F6_E2M3", 5), ("F6_E3M2", 5)]
)
def test_several_values_a_byte_refuse_themselves_alone(
    tmp_path: Path, kind: str, count: int
) -> None:
    path = save(tmp_path, {"x": entry(kind, [count]), "y": entry("U8", [4], 4, 8)}, bytes(8))
    tensors = open_safetensors(path).tensors
    assert tensors["y"].read().tolist() == [0, 0, 0, 0]
    assert (tensors["x"].type, tensors["x"].shape, tensors["x"].nbytes) == (kind, (count,), 4)
    assert f"{kind} packs several values a byte" in tensors["x"].unreadable
    with pytest.raises(CheckpointError, match=f"'x': dtype {kind} packs several"):
        tensors["x"].read()


def test_bool_must_be_0_or_1(tmp_path: Path) -> None:
    path = save(tmp_path, {"x": entry("BOOL")}, b"\0\1\2\1")
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        open_safetensors(path).tensors["x"].read()


def test_file_cut_at_every_byte(tmp_path: Path) -> None:
    data = safetensors.numpy.save({"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 2))})
    path = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            open_safetensors(path)


def test_hostile_name_does_not_reach_the_terminal(tmp_path: Path) -> None:
    path = save(tmp_path, {"\x1b[2J\n\ud800" + "x" * 10_000: entry("nope")}, bytes(4))
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500 + len(str(path))
