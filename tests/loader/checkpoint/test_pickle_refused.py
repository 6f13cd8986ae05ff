"""Pickles that attack: each is refused by name, none runs anything, none takes much of anything."""

import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.pickle import open_pickle

from .pickles import (
    MARK,
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

SIX = {"0": bytes(24)}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that every attack here tries to make."""
    return tmp_path / "marker"


def refuse(tmp_path: Path, data: bytes, reason: str) -> CheckpointError:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_pickle(path)
    assert caught.value.path == path
    assert "\n" not in str(caught.value)
    return caught.value


class Attack:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("container", [zip_file, legacy_file])
@pytest.mark.parametrize(
    ("function", "requested"),
    [
        (os.system, r"(posix|nt)\.system"),
        (eval, r"(__builtin__|builtins)\.eval"),
        (exec, r"(__builtin__|builtins)\.exec"),
        (pickle.loads, r"_?pickle\.loads"),
        (getattr, r"(__builtin__|builtins)\.getattr"),
    ],
)
def test_calls(
    tmp_path: Path,
    marker: Path,
    protocol: int,
    container: Callable[[bytes], bytes],
    function: Callable[..., Any],
    requested: str,
) -> None:
    attack = pickle.dumps({"w": Attack(function, f"touch {marker}")}, protocol)
    error = refuse(tmp_path, container(attack[2:-1]), f"refuses to run {requested} ")
    assert error.offset is not None
    assert not marker.exists()


def test_the_attack_would_work(tmp_path: Path, marker: Path) -> None:
    """What the tests above refuse does run where a pickle is trusted."""
    pickle.loads(pickle.dumps(Attack(os.system, f"touch {marker}")))
    assert marker.exists()


def test_nested_pickle_is_only_bytes(tmp_path: Path, marker: Path) -> None:
    inner = pickle.dumps(Attack(os.system, f"touch {marker}"))
    body = name("torch.storage", "_load_from_bytes")
    body += tuple_of(b"B" + struct.pack("<I", len(inner)) + inner) + REDUCE
    refuse(tmp_path, zip_file(body), r"refuses to run torch\.storage\._load_from_bytes")
    assert not marker.exists()


GLOBALS = [
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("torch", "nn.Module"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("collections", "OrderedDict.__init__"),
    ("collections.OrderedDict", "fromkeys"),
    ("torch._utils._rebuild_tensor_v2", "__call__"),
    ("numpy.core.multiarray", "fromfile"),
    ("argparse", "ArgumentParser"),
    ("pathlib", "Path.unlink"),
    ("jinfer.loader.checkpoint.open", "open_checkpoint"),
    ("", ""),
    ("torch", ""),
]


@pytest.mark.parametrize(("module", "attribute"), GLOBALS)
@pytest.mark.parametrize("stack", [False, True])
def test_globals(tmp_path: Path, module: str, attribute: str, stack: bool) -> None:
    body = text(module) + text(attribute) + b"\x93" if stack else name(module, attribute)
    refuse(tmp_path, zip_file(dict_of(w=body)), "refuses to run .*must not call code")


@pytest.mark.parametrize(
    "attribute", ["x" * 900, "\x1b[31m", "\ud800", "line\u2028two", "nul\0nul"]
)
def test_odd_names_do_not_reach_the_terminal(tmp_path: Path, attribute: str) -> None:
    body = text("os") + text(attribute) + b"\x93"
    error = refuse(tmp_path, zip_file(body), "refuses to run")
    assert str(error).isprintable()
    assert len(str(error)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x82\x01", "opcode EXT1"),
        (b"\x83\x01\x00", "opcode EXT2"),
        (b"\x84\x01\x00\x00\x00", "opcode EXT4"),
        (MARK + b"ios\nsystem\n", r"refuses to run os\.system"),
        (MARK + b"icollections\nOrderedDict\n", "opcode INST"),
        (MARK + name("collections", "OrderedDict") + b"o", "opcode OBJ"),
        (b"P123\n", "opcode PERSID"),
        (b"\x97", "opcode NEXT_BUFFER"),
        (b"\x98", "opcode READONLY_BUFFER"),
        (b"\x92", "opcode NEWOBJ_EX"),
        (b"2", "opcode DUP"),
        (b"\xff", "opcode 0xff"),
        (b"\x00", "opcode 0x00"),
        (b"\x80\x06", "protocol 6"),
        (b"\x95" + b"\xff" * 8, "cut short"),
        (integer(1) + integer(1) + REDUCE, "refuses to call int"),
        (name("torch", "FloatStorage") + b")" + REDUCE, r"refuses to call torch\.FloatStorage"),
        (name("torch", "float32") + b")" + REDUCE, r"refuses to call torch\.float32"),
        (name("collections", "OrderedDict") + b"N" + REDUCE, "not a tuple"),
        (name("collections", "OrderedDict") + b"}b", "must not run __setstate__"),
        (integer(1) + b"}b", "must not run __setstate__"),
        (b"\x93", "takes a value where there is none"),
        (b"t", "takes a value where there is none"),
        (b"(0", "takes a value where there is none"),
        (b"q\x00", "takes a value where there is none"),
        (integer(1) + integer(2) + b"\x93", "name is not text"),
        (integer(1) + integer(2) + b"a", "not a list"),
        (b"](" + integer(1) + b"u", "not a dict"),
        (b"}(" + integer(1) + b"u", "not a dict"),
        (b"h\x07", "memo index 7 was never written"),
        (b"}r\xff\xff\xff\xff", "memo index 4294967295 is above"),
        (b"\x8b\xff\xff\xff\xff", "an integer of 4294967295 bytes"),
        (b"\x8b\x00\x01\x00\x00", "an integer of 256 bytes"),
        (b"I" + b"9" * 20 + b"\n", "not an integer of at most"),
        (b"Inan\n", "not an integer"),
        (b"I" + "\u0663".encode() + b"\n", "not an integer"),
        (b"I" + b"9" * 5000, "does not end within"),
        (b"X\xff\xff\xff\x7f", "cut short"),
        (b"\x8d" + b"\xff" * 8, "cut short"),
        (b"\x8e" + b"\xff" * 8, "cut short"),
        (b"X\x02\x00\x00\x00\xff\xfe", "not UTF-8"),
    ],
)
def test_opcodes(tmp_path: Path, body: bytes, reason: str) -> None:
    refuse(tmp_path, zip_file(body), reason)


ABSURD = [-1, 2**31 - 1, 2**62, 2**63, 2**200]


@pytest.mark.parametrize("count", ABSURD)
@pytest.mark.parametrize("container", [zip_file, legacy_file])
def test_absurd_storage_sizes(tmp_path: Path, count: int, container: Callable[..., bytes]) -> None:
    stored: Any = SIX if container is zip_file else {"0": (6, bytes(24))}
    body = dict_of(w=tensor(storage(count=count)))
    refuse(tmp_path, container(body, stored), r"storage|persistent id")


@pytest.mark.parametrize(
    ("source", "shape", "strides", "at", "reason"),
    [
        (storage(), (2, 3), (3, 2), 0, "reaches element 8 of a storage of 6"),
        (storage(), (2, 3), (3, 1), 1, "reaches element 7"),
        (storage(), (1,), (1,), 6, "reaches element 7"),
        (storage(), (2, 2), (2**62, 1), 0, "reaches element"),
        (storage(), (2,) * 64, (2**62,) * 64, 0, "too large"),
        (storage(), (2**40,), (0,), 0, "repeats its elements"),
        (storage(), (2**32, 2**32), (0, 0), 0, "too large"),
        (storage(), (0, 2**63 - 1, 2**63 - 1), (1, 1, 1), 0, "too large"),
        (storage(), (-1, 3), (3, 1), 0, "non-negative"),
        (storage(), (2, 3), (-3, 1), 0, "non-negative"),
        (storage(), (2, 3), (3, 1), -1, "non-negative"),
        (storage(), (2**64,), (1,), 0, "non-negative"),
        (storage(), (2, 3), (3,), 0, "2 dimensions and 1 strides"),
        (storage(), (1,) * 65, (1,) * 65, 0, "65 dimensions"),
        (storage(key="../../etc/passwd"), (2, 3), (3, 1), 0, "is missing"),
        (storage(kind="UntypedStorage"), (2, 3), (3, 1), 0, "typed storage"),
        (storage(kind="float32"), (2, 3), (3, 1), 0, "storage class"),
        (storage(count=5), (2, 2), (2, 1), 0, "has 24 bytes, 20 are expected"),
        (integer(3), (2, 3), (3, 1), 0, "typed storage"),
        (integer(3) + PERSID, (2, 3), (3, 1), 0, "not that of a storage"),
        (tuple_of(text("storage")) + PERSID, (2, 3), (3, 1), 0, "not that of a storage"),
        (
            storage("0", 6, "FloatStorage", tuple_of(text("v"), integer(5), integer(2))),
            (2,),
            (1,),
            0,
            "ends at 7 of 6",
        ),
    ],
)
def test_tensors_outside_their_storage(
    tmp_path: Path,
    source: bytes,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    at: int,
    reason: str,
) -> None:
    body = dict_of(w=tensor(source, shape, strides, at))
    refuse(tmp_path, zip_file(body, SIX), reason)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("_rebuild_tensor_v2", ()),
        ("_rebuild_tensor_v2", (storage(),)),
        ("_rebuild_tensor_v2", (storage(), integer(0), b"]", b"]")),
        ("_rebuild_tensor_v2", (storage(), b"\x88", ints(6), ints(1))),
        ("_rebuild_tensor_v3", (storage(), integer(0), ints(6), ints(1), b"N", b"N", b"N")),
        ("_rebuild_parameter", (integer(1), b"\x88", b"}")),
        ("_rebuild_parameter", ()),
    ],
)
def test_wrong_arguments(tmp_path: Path, function: str, args: tuple[bytes, ...]) -> None:
    body = name("torch._utils", function) + tuple_of(*args) + REDUCE
    refuse(tmp_path, zip_file(dict_of(w=body), SIX), "tensor|parameter")


def test_lazy_conjugate_is_refused(tmp_path: Path) -> None:
    args = storage(), integer(0), ints(6), ints(1), b"\x89", b"}", dict_of(conj=b"\x88")
    body = name("torch._utils", "_rebuild_tensor_v2") + tuple_of(*args) + REDUCE
    refuse(tmp_path, zip_file(dict_of(w=body), SIX), "resolve_conj")


def repeated(start: bytes, step: bytes, count: int, end: bytes = b"") -> bytes:
    return start + step * count + end


def laughs(count: int) -> bytes:
    """A dict of ten times the dict before it, again and again."""
    ten = b"".join(text(f"k{i}") + b"h\x00" for i in range(10))
    return b"}q\x00" + (b"0}(" + ten + b"uq\x00") * count


def many_calls(count: int) -> bytes:
    """OrderedDict of the same long list, many times."""
    arguments = b"](" + b"N" * count + b"e\x85q\x010"
    make = name("collections", "OrderedDict") + b"q\x000"
    return make + arguments + MARK + b"h\x00h\x01R" * count + b"t"


def long_names(count: int) -> bytes:
    """Many dicts under the same long name: names of their items would take the product."""
    inner = b"}(h\x00" + tensor(storage()) + b"u"
    items = b"".join(text(f"{i}") + inner for i in range(count))
    return text("x" * 30_000) + b"q\x000}(" + items + b"u"


SHARES, NESTS, EMPTY = "shares or nests", "nested more than 16 deep", "value where there is none"
BOMBS = {
    "list laughs": (b"]q\x00" + (b"0](" + b"h\x00" * 10 + b"eq\x00") * 12, SHARES),
    "dict laughs": (laughs(12), SHARES),
    "itself": (b"}q\x00(" + text("a") + b"h\x00u", NESTS),
    "list in itself": (b"}" + text("a") + b"]q\x00h\x00as", NESTS),
    "deep dicts": ((b"}" + text("a")) * 20_000 + b"N" + b"s" * 20_000, NESTS),
    "deep tuples": (b"N" + b"\x85" * 100_000, NESTS),
    "deep marks": (MARK * 100_000, EMPTY),
    "one key": (b"}" + (integer(2**61 - 1) + b"Ns") * 10_000, "twice"),
    "many calls": (many_calls(10_000), "not a pair"),
    "long names": (long_names(1000), SHARES),
}


@pytest.mark.parametrize(("bomb", "reason"), BOMBS.values(), ids=BOMBS)
def test_bombs(tmp_path: Path, bomb: bytes, reason: str) -> None:
    data = zip_file(dict_of(state_dict=bomb))
    start = time.process_time()
    tracemalloc.start()
    try:
        refuse(tmp_path, data, reason)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 10
    assert peak < (16 << 20) + 200 * len(data)


def colliding(count: int) -> bytes:
    """Integer keys with one hash: a dict of them takes quadratic time."""
    items = b"".join(integer(i * (2**61 - 1)) + b"N" for i in range(1, count))
    return b"}(" + items + b"u"


def test_colliding_keys_are_no_slower(tmp_path: Path) -> None:
    body = dict_of(w=tensor(storage()), other=colliding(20_000))
    path = tmp_path / "model.pt"
    path.write_bytes(zip_file(body, SIX))
    start = time.process_time()
    assert set(open_pickle(path).tensors) == {"w"}
    assert time.process_time() - start < 5  # a dict takes minutes


def test_advice_for_tensors_of_a_quantizer(tmp_path: Path) -> None:
    body = b"ctorch._utils\n_rebuild_wrapper_subclass\n"
    refuse(tmp_path, zip_file(dict_of(w=body)), r"a quantizer's own class.*save the model with saf")
