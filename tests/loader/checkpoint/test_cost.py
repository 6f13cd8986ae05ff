"""Files that claim or share more than they hold are refused before it costs anything."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.orbax import describe_file

from .pickles import MARK, dict_of, storage, tensor, text, zip_file

SIX = {"0": bytes(24)}
ITEMS = b"".join(text(f"{number:03d}") + b"K\1" for number in range(900))
SHARED = b"}" + MARK + ITEMS + b"uq\0"
PADDING = b"X" + struct.pack("<I", 24 << 20) + b"x" * (24 << 20) + b"0"


def of_many(values: bytes) -> bytes:
    """A pickle of {"a": (values...)}."""
    return zip_file(b"}" + MARK + text("a") + MARK + values + b"tu", SIX)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (of_many(PADDING + b"]" * 7_000_000), "takes more than 2000000 steps"),
        (of_many(b"}" * 2_900_000), r"takes more than 82\d{4} steps"),
        (of_many(PADDING + SHARED + b"h\0" * 1_500_000), "shares or nests containers"),
    ],
)
def test_pickles_of_shared_containers(tmp_path: Path, data: bytes, words: str) -> None:
    """30 MB of them took 35 s and 1.7 GB."""
    path = tmp_path / "shared.pt"
    path.write_bytes(data)
    begun = time.thread_time()
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
    assert time.thread_time() - begun < 20  # a quarter of it on a machine that does nothing else


def rewritten(path: Path, name: str, content: bytes) -> None:
    """Puts an entry in place of another one, deflated."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    folder = next(iter(entries)).split("/")[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in {**entries, f"{folder}/{name}": content}.items():
            archive.writestr(each, data)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data.pkl", os.urandom(1 << 19) * 80, "data.pkl inflates to 41943040 bytes"),
        ("byteorder", b"little" + b" " * (60 << 20), "inflates"),
        ("data/1", os.urandom(1 << 16) + bytes(100 << 20), "inflate"),
    ],
)
def test_entries_are_not_inflated_before_their_bound(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = tmp_path / "inflating.pt"
    path.write_bytes(zip_file(dict_of(w=tensor(storage())), SIX))
    rewritten(path, name, content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_repeated_elements_count_for_every_tensor(tmp_path: Path) -> None:
    """Each of them alone may be sixteen million bytes."""
    path = tmp_path / "strides.pt"
    repeated = tensor(storage(), shape=(4_000_000,), strides=(0,))
    few = {f"w{number}": repeated for number in range(3)}
    path.write_bytes(zip_file(dict_of(**few), SIX))
    assert len(open_checkpoint(path).tensors) == 3
    many = {f"w{number}": repeated for number in range(500)}
    path.write_bytes(zip_file(dict_of(**many), SIX))
    with pytest.raises(CheckpointError, match="500 tensors have 8000000000 bytes in a file of"):
        open_checkpoint(path)


def test_empty_tensors_are_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "empty.pt"
    shapes = [(0,), (0, 7), (7, 0)]
    tensors = {
        f"w{n}": tensor(storage(), shape=s, strides=(1,) * len(s)) for n, s in enumerate(shapes)
    }
    path.write_bytes(zip_file(dict_of(**tensors), SIX))
    assert [t.read().shape for t in open_checkpoint(path).tensors.values()] == shapes


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200, "lone \ud800", "line\nbreak"])
def test_names_of_shards_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    written = name.encode("unicode_escape").decode().replace("\\x", "\\u00")
    index.write_text(f'{{"weight_map": {{"w": "{written}"}}}}')
    with pytest.raises(CheckpointError, match="is not a plain file name in the same folder"):
        open_checkpoint(tmp_path)


def test_a_pipe_in_an_orbax_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        describe_file(tmp_path / "pipe")


def test_keys_of_gguf_without_end(tmp_path: Path) -> None:
    pair = struct.Struct("<Q6sIB")
    pairs = b"".join(pair.pack(6, b"%06d" % number, 7, 1) for number in range(70_000))
    path = tmp_path / "keys.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 70_000) + pairs)
    with pytest.raises(CheckpointError, match="has 70000 key-value pairs; at most 65536 are read"):
        open_checkpoint(path)


def test_tensors_of_safetensors_without_end(tmp_path: Path) -> None:
    entry = '"w%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(131_073)) + "}").encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="has 131073 tensors; at most 131072 are read"):
        open_checkpoint(path)
