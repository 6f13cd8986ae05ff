"""Pickles written opcode by opcode, and PyTorch files around them, for tests."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

STOP = b"."
MARK = b"("
TUPLE = b"t"
REDUCE = b"R"
PERSID = b"Q"
MAGIC = 0x1950A86A20F9469CFC6C


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """BININT where it fits, LONG1 otherwise."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def ints(*values: int) -> bytes:
    return tuple_of(*map(integer, values))


def dict_of(**items: bytes) -> bytes:
    return b"}" + MARK + b"".join(text(key) + value for key, value in items.items()) + b"u"


def storage(
    key: str = "0", count: int = 6, kind: str = "FloatStorage", *view: bytes, module: str = "torch"
) -> bytes:
    """A persistent id, loaded."""
    items = text("storage"), name(module, kind), text(key), text("cpu"), integer(count), *view
    return tuple_of(*items) + PERSID


def tensor(
    source: bytes, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1), at: int = 0
) -> bytes:
    """_rebuild_tensor_v2."""
    args = source, integer(at), ints(*shape), ints(*strides), b"\x89", b"}"
    return name("torch._utils", "_rebuild_tensor_v2") + tuple_of(*args) + REDUCE


def zip_file(
    body: bytes,
    storages: dict[str, bytes] | None = None,
    extra: dict[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> bytes:
    """A PyTorch archive whose data.pkl is `body` with protocol 2 and STOP around it."""
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", method) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + STOP)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        for key, data in (extra or {}).items():
            archive.writestr(f"archive/{key}", data)
    return result.getvalue()


def legacy_file(body: bytes, storages: dict[str, tuple[int, bytes]] | None = None) -> bytes:
    """A PyTorch file of the format before 1.6; a storage is its number of elements and bytes."""
    storages = storages or {}
    heads = [pickle.dumps(value, 2) for value in (MAGIC, 1001, {"little_endian": True})]
    data = b"".join(heads) + b"\x80\x02" + body + STOP + pickle.dumps(list(storages), 2)
    for count, raw in storages.values():
        data += struct.pack("<q", count) + raw
    return data
