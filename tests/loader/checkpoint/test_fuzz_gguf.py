"""GGUF files that lie or are damaged: `CheckpointError`, in bounded time and memory."""

import re
import struct
from pathlib import Path

import pytest

from jinfer.loader.checkpoint import ggml_types
from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError
from jinfer.loader.checkpoint.gguf import open_gguf

from .fuzzing import EXAMPLES, fuzz
from .test_gguf import ARRAY, F32, Q4_0, STRING, U32, Info, array, build, pair, small_file, text


def open_bytes(folder: Path, data: bytes) -> Checkpoint:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return open_gguf(path)


def nested(depth: int) -> bytes:
    """A list in a list in a list, ..."""
    value = array(0, 0, b"")
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return build([pair(b"k", ARRAY, value)])


def one(info: Info, nbytes: int = 64) -> bytes:
    return build([], [info], bytes(nbytes))


def aligned_to(value: bytes, kind: int = U32) -> bytes:
    return build([pair(b"general.alignment", kind, value)], [Info(b"x", [2])], bytes(64))


HUGE = 2**64 - 1
BAD_FILES = {
    "empty": (b"", "takes 4 bytes or more and the file has 0"),
    "magic": (b"GGML" + bytes(60), "starts with b'GGML': no GGUF file"),
    "version 1": (build(version=1), "version 1 is not supported; convert"),
    "version 4": (build(version=4), "version 4 is not known"),
    "version 0": (build(version=0), "version 0 is not known"),
    "big-endian version 1": (build(version=1, order=">"), "version 1 is not supported"),
    "tensor count": (build(counts=(HUGE, 0)), "18446744073709551615 tensors and 0 key"),
    "many keys": (build(counts=(0, 2**40)), "1099511627776 key-value pairs; at most 65536 are"),
    "key count": (build(counts=(0, 65536)), "0 tensors and 65536 key-value pairs: takes"),
    "one more key": (build([pair(b"k", 0, b"1")], counts=(0, 2), alignment=1), "takes 26 bytes"),
    "key length": (build([struct.pack("<Q", HUGE) + bytes(9)]), "key 0: string 0 ends after"),
    "value type": (build([pair(b"k", 13, bytes(8))]), "value of 'k': type 13 is not known"),
    "string length": (build([pair(b"k", 8, struct.pack("<Q", 2**62))]), "'k': string 0 ends after"),
    "bool": (build([pair(b"k", 7, b"\2")]), "a bool is 2, neither 0 nor 1"),
    "bools": (build([pair(b"k", 9, array(7, 2, b"\1\3"))]), "a bool is 3"),
    "cut number": (build([pair(b"key", 10, b"12")], alignment=1), "'key': takes 8 bytes .* has 2"),
    "array type": (build([pair(b"k", 9, array(99, 0, b""))]), "array type 99 is not known"),
    "array length": (build([pair(b"k", 9, array(0, 2**62, b""))], alignment=1), "array of 46116"),
    "empty strings": (build([pair(b"k", 9, array(8, 2**61, b""))]), "array of 2305843009213693952"),
    "strings": (build([pair(b"k", 9, array(8, 2, text(b"a") + text(b"b")[:8]))], alignment=1),
                "string 1 ends after"),
    "arrays": (build([pair(b"k", 9, array(9, 2**60, b""))]), "array of 1152921504606846976"),
    "depth": (nested(9), "arrays are nested more than 8 deep"),
    "great depth": (nested(10_000), "arrays are nested more than 8 deep"),
    "key twice": (build([pair(b"k", 0, b"1")] * 2), "key 'k' is there twice"),
    "alignment 0": (aligned_to(bytes(4)), "alignment is 0, not a power of two"),
    "alignment 1": (aligned_to(b"\1\0\0\0"), "alignment is 1, not"),
    "alignment 24": (aligned_to(b"\x18\0\0\0"), "alignment is 24, not"),
    "alignment 2^31": (aligned_to(b"\0\0\0\x80"), "alignment is 2147483648, not"),
    "alignment text": (aligned_to(text(b"32"), STRING), "alignment is '32', not"),
    "alignment true": (aligned_to(b"\1", 7), "alignment is True, not"),
    "alignment 32.0": (aligned_to(struct.pack("<f", 32), 6), r"alignment is 32\.0, not"),
    "five dimensions": (one(Info(b"x", [1] * 5)), "'x' has 5 dimensions; at most 4"),
    "dimension 0": (one(Info(b"x", [2, 0])), r"shape \(0, 2\): a dimension is 0"),
    "overflow": (one(Info(b"x", [2**32] * 2)), "'x': bytes .* are not in the file"),
    "negative": (one(Info(b"x", [HUGE])), "'x': bytes .* are not in the file"),
    "type": (one(Info(b"x", [1], 1000)), "'x': type 1000 is not known; a newer gguf"),
    "removed type": (one(Info(b"x", [32], 4)), "removed type 4; convert the model again"),
    "row": (one(Info(b"x", [33], Q4_0)), "rows of 33 are not whole Q4_0 blocks of 32"),
    "scalar row": (one(Info(b"x", [], Q4_0)), "rows of 1 are not whole Q4_0 blocks"),
    "misaligned": (one(Info(b"x", [1], F32, 8)), "offset 8 is no multiple of the alignment, 32"),
    "offset": (one(Info(b"x", [1], F32, 64)), "'x': bytes 128 to 132 are not in the file of 128"),
    "far offset": (one(Info(b"x", [1], F32, 2**64 - 32)), "are not in the file"),
    "too long": (one(Info(b"x", [17])), "'x': bytes 64 to 132 are not in the file of 128"),
    "tensor twice": (build([], [Info(b"x", [1]), Info(b"x", [1], F32, 32)], bytes(64)),
                     "tensor 'x' is there twice"),
    "overlap": (build([], [Info(b"x", [1], F32, 32), Info(b"y", [9])], bytes(64)),
                "tensors 'y' and 'x' overlap"),
    "same place": (build([], [Info(b"x", [1]), Info(b"y", [1])], bytes(64)), "overlap"),
    "unprintable name": (one(Info(b"a\n\xff" + b"b" * 300, [0])), r"'a\\n\\udcffb{61}' has shape"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason) as error:
        open_gguf(path)
    assert error.value.path == path
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()


def test_smallest_file_with_a_lying_array(tmp_path: Path) -> None:
    """On this one the `gguf` package's reader never ends."""
    data = build([pair(b"k", ARRAY, array(0, 2**62, b""))], alignment=1)
    assert len(data) == 49
    with pytest.raises(CheckpointError) as error:
        open_bytes(tmp_path, data)
    assert error.value.offset == 49


def test_depth_that_is_allowed(tmp_path: Path) -> None:
    assert open_bytes(tmp_path, nested(8)).metadata["k"] == [[[[[[[[]]]]]]]]


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in checkpoint.tensors.items()}


def test_file_cut_at_every_byte(tmp_path: Path) -> None:
    data = small_file()
    whole = read_all(open_bytes(tmp_path, data))
    assert list(whole) == ["one", "two", "three"]
    assert whole["three"] == struct.pack("<f", 7)
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            open_bytes(tmp_path, data[:length])


def all_types(order: str) -> bytes:
    """A block or four of every type, and a small vocabulary."""
    vocabulary = array(STRING, 20, text(b"token", order) * 20, order)
    infos, data = [], b""
    for block in ggml_types.BLOCKS.values():
        infos.append(Info(block.name.encode(), [block.values, 4], block.type_id, len(data)))
        data += bytes(range(1, 5)) * block.bytes
        data += bytes(-len(data) % 32)
    scores = array(6, 20, struct.pack(f"{order}20f", *range(20)), order)
    pairs = [pair(b"tokens", ARRAY, vocabulary, order), pair(b"scores", ARRAY, scores, order)]
    return build(pairs, infos, data, order=order)


def common_types_big_endian() -> bytes:
    infos = [Info(b"a", [4, 2]), Info(b"b", [64], ggml_types.BLOCKS["Q4_0"].type_id, 32)]
    return build([pair(b"n", 5, b"\0\0\0\5", ">")], infos, bytes(68), order=">")


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_files(tmp_path: Path, examples: int) -> None:
    seeds = [small_file(), all_types("<"), common_types_big_endian()]
    fuzz(open_gguf, seeds, tmp_path, examples)
