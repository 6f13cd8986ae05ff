"""Zip archives that lie: about sizes, places, names, and what they inflate to."""

import struct
import zipfile
from pathlib import Path

import pytest

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.pickle import open_pickle

from .pickles import dict_of, storage, tensor, zip_file
from .test_pickle_refused import SIX, refuse


def test_inflating_storage_is_refused(tmp_path: Path) -> None:
    body = dict_of(w=tensor(storage(count=1 << 20), (1 << 20,), (1,)))
    data = zip_file(body, {"0": bytes(4 << 20)}, method=zipfile.ZIP_DEFLATED)
    assert len(data) < 10_000
    refuse(tmp_path, data, "inflates more than")


def test_inflated_size_must_equal_the_claimed_size(tmp_path: Path) -> None:
    """A directory that claims less than a stream inflates to."""
    body = dict_of(w=tensor(storage()))
    data = bytearray(zip_file(body, {"0": bytes(range(24)) * 40}, method=zipfile.ZIP_DEFLATED))
    for signature, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = data.rfind(signature)
        data[place + at : place + at + 4] = struct.pack("<I", 24)
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    tensor_read = open_pickle(path).tensors["w"].read
    with pytest.raises(CheckpointError, match="size or checksum"):
        tensor_read()


def patched(data: bytes, signature: bytes, at: int, value: bytes, last: bool = True) -> bytes:
    """A zip file with bytes changed in the last (or first) record of a kind."""
    place = data.rfind(signature) if last else data.find(signature)
    return data[: place + at] + value + data[place + at + len(value) :]


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


@pytest.mark.parametrize(
    ("signature", "at", "value", "reason"),
    [
        (LOCAL, 0, b"PKxx", "does not agree"),
        (LOCAL, 8, b"\x08\0", "does not agree"),
        (LOCAL, 18, b"\x01\0\0\0", "local header says 1 bytes"),
        (LOCAL, 26, b"\xff\xff", "cut short|damaged"),
        (LOCAL, 28, b"\xff\xff", "cut short|damaged"),
        (LOCAL, 30, b"x", "does not agree"),
        (CENTRAL, 8, b"\x01\0", "encrypted"),
        (CENTRAL, 10, b"\x0c\0", "compression method 12"),
        (CENTRAL, 20, b"\x00\0\0\x7f", "local header says"),
        (CENTRAL, 42, b"\x00\0\0\0", "overlaps|does not agree"),
        (CENTRAL, 42, b"\xff\xff\xff\x7f", "cut short|damaged"),
        (END, 12, b"\xff\xff\xff\x7f", "directory is damaged"),
        (END, 16, b"\xff\xff\xff\x7f", "directory is damaged"),
    ],
)
def test_zip_records_are_checked(
    tmp_path: Path, signature: bytes, at: int, value: bytes, reason: str
) -> None:
    data = zip_file(dict_of(w=tensor(storage())), SIX)
    refuse(tmp_path, patched(data, signature, at, value), reason)


def test_overlapping_entries_are_refused(tmp_path: Path) -> None:
    """A second local header inside the data of the first entry."""
    inner = zip_file(dict_of(), {"0": bytes(24)})
    start = inner.rfind(LOCAL)
    local = inner[start : inner.find(CENTRAL)]
    data = zip_file(dict_of(w=tensor(storage())), {"1": local, "0": bytes(24)})
    place = data.find(local)
    data = patched(data, CENTRAL, 42, struct.pack("<I", place))
    refuse(tmp_path, data, "overlaps the one before it")


def test_word_entries_are_checked(tmp_path: Path) -> None:
    body = dict_of(w=tensor(storage()))
    refuse(tmp_path, zip_file(body, SIX, {"byteorder": b"middle"}), "byte order")
    refuse(tmp_path, zip_file(body, SIX, {"constants.pkl": b""}), "TorchScript")


def test_two_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(zip_file(b"}", SIX))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"}.")
    refuse(tmp_path, path.read_bytes(), r"2 <name>/data\.pkl")
