"""Damaged PyTorch files, and random pickles, are read or refused, never worse."""

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.open import open_checkpoint
from jinfer.loader.checkpoint.pickle import open_pickle

from .fuzzing import EXAMPLES, check_reader, fuzz, fuzz_settings
from .pickles import MARK, PERSID, REDUCE, TUPLE, integer, ints, name, storage, text, zip_file
from .test_pickle import DATA, rewritten

SIX = {"0": bytes(24)}
PIECES = [
    *(MARK, TUPLE, REDUCE, PERSID, b"}", b"]", b")", b"N", b"\x88", b"\x85", b"\x86", b"\x87"),
    *(b"s", b"u", b"a", b"e", b"b", b"\x81", b"\x94", b"0", b"1", b"h\x00", b"h\x01", b"q\x00"),
    *(b"q\x01", b"G" + bytes(8), b"C\x01x", b"U\x01\xff", b"\x93", b"I7\n"),
    *(integer(0), integer(6), integer(-1), integer(2**63), text("0"), text("w"), text("storage")),
    *(ints(2, 3), ints(3, 1), ints(6), ints(1)),
    *(storage(), storage(kind="UntypedStorage", count=24)),
    *(name("torch", "FloatStorage"), name("torch", "float16"), name("torch", "Size")),
    name("collections", "OrderedDict"),
    name("torch._utils", "_rebuild_tensor_v2"),
    name("torch._utils", "_rebuild_tensor_v3"),
    name("torch._utils", "_rebuild_parameter"),
    name("torch._tensor", "_rebuild_from_type_v2"),
]  # fmt: skip


def seeds(*names: str) -> list[bytes]:
    return [(DATA / name).read_bytes() for name in names]


def pickle_in(file: str) -> bytes:
    with zipfile.ZipFile(DATA / file) as archive:
        return archive.read(file.replace(".pt", "/data.pkl"))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_zip_files(tmp_path: Path, examples: int) -> None:
    files = seeds("zip.pt", "trained.pt", "protocol4.pt")
    files.append(rewritten("protocol4.pt", {}, zipfile.ZIP_DEFLATED))
    fuzz(open_pickle, files, tmp_path, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_pickles_in_good_archives(tmp_path: Path, examples: int) -> None:
    file = "protocol4.pt"

    def open_inside(path: Path) -> Checkpoint:
        archive = path.with_suffix(".pt")
        archive.write_bytes(rewritten(file, {"data.pkl": path.read_bytes()}))
        return open_pickle(archive)

    fuzz(open_inside, [pickle_in(file)], tmp_path, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_legacy_files(tmp_path: Path, examples: int) -> None:
    fuzz(open_pickle, seeds("legacy.pt"), tmp_path, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_random_programs(tmp_path: Path, examples: int) -> None:
    @fuzz_settings(examples)
    @given(st.lists(st.sampled_from(PIECES), max_size=30))
    def run(pieces: list[bytes]) -> None:
        check_reader(open_pickle, zip_file(b"".join(pieces), SIX), tmp_path)

    run()


def test_damaged_files_of_any_format(tmp_path: Path) -> None:
    fuzz(open_checkpoint, seeds("zip.pt", "legacy.pt"), tmp_path, 300)
