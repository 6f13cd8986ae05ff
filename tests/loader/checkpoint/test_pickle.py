"""PyTorch files that torch wrote, against the values that torch gave, and rarer layouts by hand."""

import argparse
import collections
import datetime
import io
import json
import pickle
import struct
import types
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.pickle import open_pickle

from .pickles import (
    PERSID,
    REDUCE,
    dict_of,
    integer,
    ints,
    legacy_file,
    name,
    storage,
    tensor,
    text,
    tuple_of,
    zip_file,
)

DATA = Path(__file__).parent / "data"
SIX = np.arange(6, dtype=np.float32)


def expected(prefix: str = "") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> type, shape, bytes, as torch had them."""
    result = {}
    with np.load(DATA / "expected.npz") as arrays:
        for key in arrays:
            label, kind, shape = key.split("|")
            if label.startswith(prefix):
                values = (kind, tuple(json.loads(shape)), arrays[key].tobytes())
                result[label.removeprefix(prefix)] = values
    return result


def open_bytes(tmp_path: Path, data: bytes) -> Checkpoint:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    return open_checkpoint(path)


def assert_same(checkpoint: Checkpoint, reference: dict[str, Any]) -> None:
    assert checkpoint.tensors.keys() == reference.keys()
    for label, (kind, shape, raw) in reference.items():
        found = checkpoint.tensors[label]
        assert (found.type, found.shape, found.nbytes) == (kind, shape, len(raw)), label
        assert found.raw().tobytes() == raw, label
        values = found.read()
        assert np.ascontiguousarray(values).tobytes() == raw, label
        assert values.shape == shape
        assert not values.flags.writeable


def rewritten(file: str, changes: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive again, entries replaced or added by the end of their name, or compressed."""
    result = io.BytesIO()
    with zipfile.ZipFile(DATA / file) as old, zipfile.ZipFile(result, "w", method) as new:
        for info in old.infolist():
            key = info.filename.partition("/")[2]
            new.writestr(info.filename, changes.get(key, old.read(info)))
    return result.getvalue()


@pytest.mark.parametrize("file", ["zip.pt", "legacy.pt"])
def test_every_type_and_view(file: str) -> None:
    checkpoint = open_checkpoint(DATA / file)
    assert checkpoint.format == "pickle"
    reference = {k: v for k, v in expected().items() if not k.startswith("trained.")}
    assert len(reference) == 33
    assert_same(checkpoint, reference)


def test_types_are_numpys() -> None:
    tensors = open_checkpoint(DATA / "zip.pt").tensors
    assert tensors["type.BF16"].read().dtype == ml_dtypes.bfloat16
    assert tensors["type.F8_E4M3"].read().dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(
        tensors["type.F16"].read(), np.array([[0.5, 1, 2], [3, 4, 96]], np.float16)
    )


def test_nothing_is_copied() -> None:
    """Aligned tensors, strided ones too, are views of the one memory map."""
    tensors = open_checkpoint(DATA / "zip.pt").tensors
    views = [tensors[f"view.{key}"].read() for key in ("whole", "tied", "transposed", "windows")]
    for view in views[1:]:
        assert np.shares_memory(view, views[0])
    assert views[2].strides == (4, 24)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_protocols(protocol: int) -> None:
    checkpoint = open_checkpoint(DATA / f"protocol{protocol}.pt")
    assert checkpoint.metadata == {"steps": 7}
    np.testing.assert_array_equal(
        checkpoint.tensors["a.weight"].read(), np.array([0, 1, 2], np.float32)
    )


def test_training_file_gives_the_model() -> None:
    checkpoint = open_checkpoint(DATA / "trained.pt")
    assert_same(checkpoint, expected("trained."))
    assert checkpoint.metadata == {"epoch": 3, "loss": 0.25, "name": "tiny", "best": None}


@pytest.mark.parametrize("kind", ["Float8_e5m2", "Float8_e4m3fn", "bfloat16", "complex128"])
def test_transposed(tmp_path: Path, kind: str) -> None:
    """Also of types that NumPy knows no name of."""
    label, dtype = {
        "Float8_e5m2": ("float8_e5m2", ml_dtypes.float8_e5m2),
        "Float8_e4m3fn": ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        "bfloat16": ("bfloat16", ml_dtypes.bfloat16),
        "complex128": ("complex128", np.complex128),
    }[kind]
    values = np.arange(16).reshape(4, 4).astype(dtype)
    source = storage(count=values.nbytes, kind="UntypedStorage", module="torch.storage")
    args = source, integer(0), ints(4, 4), ints(1, 4), b"\x89", b"}", name("torch", label)
    body = name("torch._utils", "_rebuild_tensor_v3") + tuple_of(*args) + REDUCE
    found = open_bytes(tmp_path, zip_file(dict_of(x=body), {"0": values.tobytes()})).tensors["x"]
    assert found.read().dtype == dtype
    assert found.raw().tobytes() == np.ascontiguousarray(values.T).tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=0.1, nested=argparse.Namespace(layers=2)),
        types.SimpleNamespace(a=1),
        np.float64(0.5),
        np.int64(7),
        np.arange(3),
        np.random.RandomState(0).get_state(),
        Path("a/b"),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        collections.defaultdict(dict, a={}),
        collections.Counter("abca"),
        {"nested": [np.float32(1.0)]},
    ],
    ids=repr,
)
def test_training_state_next_to_weights(tmp_path: Path, protocol: int, value: object) -> None:
    """Read past, and never made."""
    beside = pickle.dumps(value, protocol)[2:-1]
    body = dict_of(args=beside, model=dict_of(w=tensor(storage())))
    found = open_bytes(tmp_path, zip_file(body, {"0": SIX.tobytes()}))
    assert list(found.tensors) == ["w"]
    np.testing.assert_array_equal(found.tensors["w"].read(), SIX.reshape(2, 3))


def test_a_dict_of_lightning(tmp_path: Path) -> None:
    """NEWOBJ, items, and attributes that are left out."""
    made = name("lightning.fabric.utilities.data", "AttributeDict") + b")\x81"
    body = made + b"(" + text("w") + tensor(storage()) + b"u" + b"}b"
    found = open_bytes(tmp_path, zip_file(dict_of(state_dict=body), {"0": SIX.tobytes()}))
    assert list(found.tensors) == ["w"]


def test_compressed_archive(tmp_path: Path) -> None:
    data = rewritten("zip.pt", {}, zipfile.ZIP_DEFLATED)
    reference = {k: v for k, v in expected().items() if not k.startswith("trained.")}
    assert_same(open_bytes(tmp_path, data), reference)


@pytest.mark.parametrize("kind", ["<f4", "<c16", "<i2"])
def test_big_endian_archive(tmp_path: Path, kind: str) -> None:
    values = np.arange(6).astype(kind) * np.array(3).astype(kind)
    classes = {"<f4": "FloatStorage", "<c16": "ComplexDoubleStorage", "<i2": "ShortStorage"}
    body = dict_of(x=tensor(storage(kind=classes[kind]), (3, 2), (1, 3)))
    swapped = values.astype(np.dtype(kind).newbyteorder(">")).tobytes()
    data = zip_file(body, {"0": swapped}, {"byteorder": b"big"})
    found = open_bytes(tmp_path, data).tensors["x"]
    np.testing.assert_array_equal(found.read(), values.reshape(2, 3).T)
    assert found.raw().tobytes() == np.ascontiguousarray(values.reshape(2, 3).T).tobytes()


def test_python_2_pickle(tmp_path: Path) -> None:
    """Byte strings, integers as text, an OrderedDict of a list of pairs, the first _rebuild."""
    key = b"U\x01w"
    pid = tuple_of(
        b"U\x07storage", name("torch", "FloatStorage"), b"U\x010", b"U\x03cpu", b"I6\n", b"N"
    )
    args = tuple_of(pid + PERSID, b"I0\n", tuple_of(b"I6\n"), tuple_of(b"I1\n"))
    value = name("torch._utils", "_rebuild_tensor") + args + REDUCE
    pairs = b"](](" + key + value + b"ee"
    body = name("collections", "OrderedDict") + tuple_of(pairs) + REDUCE
    body += dict_of(_metadata=b"}") + b"b"  # attributes, set by BUILD
    found = open_bytes(tmp_path, legacy_file(body, {"0": (6, SIX.tobytes())}))
    np.testing.assert_array_equal(found.tensors["w"].read(), SIX)


def test_legacy_storage_view(tmp_path: Path) -> None:
    view = tuple_of(text("view"), integer(2), integer(3))
    body = dict_of(x=tensor(storage("0", 6, "FloatStorage", view), (2,), (1,), 1))
    found = open_bytes(tmp_path, legacy_file(body, {"0": (6, SIX.tobytes())}))
    np.testing.assert_array_equal(found.tensors["x"].read(), SIX[3:5])


def test_cuda_storage_class(tmp_path: Path) -> None:
    body = dict_of(x=tensor(storage(module="torch.cuda")))
    found = open_bytes(tmp_path, zip_file(body, {"0": SIX.tobytes()}))
    np.testing.assert_array_equal(found.tensors["x"].read(), SIX.reshape(2, 3))


X = tensor(storage())


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (dict_of(state_dict=dict_of(w=X)), {"w"}),
        (dict_of(module=dict_of(model=dict_of(w=X))), {"w"}),
        (dict_of(model=dict_of(w=X), ema=dict_of(w=X)), {"w"}),
        (dict_of(w=X, model=dict_of(w=X)), {"w", "model.w"}),
        (dict_of(encoder=dict_of(w=X), decoder=dict_of(w=X)), {"encoder.w", "decoder.w"}),
        (dict_of(model=dict_of(n=integer(1)), it=b"](" + X + X + b"e"), {"it.0", "it.1"}),
        (b"}" + integer(3) + X + b"s", {"3"}),
    ],
)  # fmt: skip
def test_nesting(tmp_path: Path, body: bytes, names: set[str]) -> None:
    found = open_bytes(tmp_path, zip_file(body, {"0": SIX.tobytes()}))
    assert set(found.tensors) == names


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (dict_of(state_dict=dict_of(w=X), model=dict_of(w=X)), "several state dicts"),
        (X, "holds a tensor"),
        (dict_of(), "no tensors"),
        (dict_of(n=integer(1)), "no tensors"),
        (b"}(" + (text("w") + X) * 2 + b"u", "key 'w' twice"),
        (b"}(" + text("a.b") + X + text("a") + dict_of(b=X) + b"u", "tensor 'a.b' twice"),
    ],
)
def test_no_state_dict(tmp_path: Path, body: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_bytes(tmp_path, zip_file(body, {"0": SIX.tobytes()}))


def test_program_and_module_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"TorchScript.*state_dict"):
        open_checkpoint(DATA / "script.pt")
    with pytest.raises(CheckpointError, match=r"refuses to run torch.nn.modules.linear.Linear"):
        open_checkpoint(DATA / "module.pt")


def test_tar_file_is_refused_by_name(tmp_path: Path) -> None:
    head = b"storages".ljust(257, b"\0") + b"ustar\0" + b"00"
    with pytest.raises(CheckpointError, match="tar file of PyTorch before"):
        open_bytes(tmp_path, head.ljust(1024, b"\0"))


def test_complete_archive_cut_anywhere(tmp_path: Path) -> None:
    data = (DATA / "protocol4.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            open_pickle(path)


def test_legacy_file_cut_anywhere(tmp_path: Path) -> None:
    data = legacy_file(dict_of(x=X), {"0": (6, SIX.tobytes())})
    path = tmp_path / "cut.pt"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            open_pickle(path)


@pytest.mark.parametrize(
    ("storages", "reason"),
    [
        ({}, "'0' is missing"),
        ({"0": (5, bytes(20))}, "has 5 elements"),
        ({"0": (-6, bytes(24))}, "has -6 elements"),
        ({"0": (2**62, bytes(24))}, "has 4611686018427387904 elements"),
        ({"0": (6, bytes(23))}, "cut short"),
        ({"0": (6, bytes(25))}, "1 bytes after"),
        ({"0": (6, bytes(24)), "1": (1, bytes(4))}, "used by no tensor"),
    ],
)
def test_legacy_storages_are_checked(
    tmp_path: Path, storages: dict[str, tuple[int, bytes]], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_bytes(tmp_path, legacy_file(dict_of(x=X), storages))


def test_bool_is_checked(tmp_path: Path) -> None:
    body = dict_of(x=tensor(storage(kind="BoolStorage")))
    found = open_bytes(tmp_path, zip_file(body, {"0": bytes([0, 1, 2, 0, 0, 0])}))
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        found.tensors["x"].read()


def test_struct_of_magic() -> None:
    """The legacy format's first pickle is the one its description gives."""
    assert (DATA / "legacy.pt").read_bytes().startswith(legacy_file(b"")[:15])
    assert struct.unpack("<q", legacy_file(b"", {"0": (3, b"")})[-8:]) == (3,)
