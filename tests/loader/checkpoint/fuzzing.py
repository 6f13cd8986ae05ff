"""Damage to small valid files, and what every reader must do with them.

A reader either opens a damaged file and reads all of its tensors, or raises `CheckpointError`;
it does so within a time, and within an amount of memory that grows with the file's size only.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError

EXAMPLES = [300, pytest.param(20_000, marks=pytest.mark.soak)]
SECONDS = 5.0
MEMORY = 64 << 20
MEMORY_PER_BYTE = 200

EXTREMES: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    1023,
    32767,
    32768,
    65535,
    65536,
)
EXTREMES += (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

Edit = Callable[[bytearray, int, int], None]


def _flip(data: bytearray, at: int, value: int) -> None:
    data[at] ^= 1 << value % 8


def _set_byte(data: bytearray, at: int, value: int) -> None:
    data[at] = value % 256


def _truncate(data: bytearray, at: int, value: int) -> None:
    del data[at:]


def _delete(data: bytearray, at: int, value: int) -> None:
    del data[at : at + 1 + value % 64]


def _repeat(data: bytearray, at: int, value: int) -> None:
    data[at:at] = data[at : at + 1 + value % 64]


def _splice(data: bytearray, at: int, value: int) -> None:
    piece = data[value % len(data) :][:48]
    data[at : at + len(piece)] = piece


def _overwrite_int(data: bytearray, at: int, value: int) -> None:
    integer = _integer(value)
    data[at : at + len(integer)] = integer


def _insert_int(data: bytearray, at: int, value: int) -> None:
    data[at:at] = _integer(value)


def _digits(data: bytearray, at: int, value: int) -> None:
    """Puts an extreme decimal number where text has one (JSON, protocol 0 pickles)."""
    start = next((i for i in range(at, len(data)) if 48 <= data[i] <= 57), at)
    end = start
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    data[start:end] = str(EXTREMES[value % len(EXTREMES)] * (-1) ** (value >> 8)).encode()


def _integer(value: int) -> bytes:
    width = (1, 2, 4, 8)[value >> 8 & 3]
    number = EXTREMES[value % len(EXTREMES)] % (1 << 8 * width)
    return struct.pack("<Q", number)[:width]


EDITS: tuple[Edit, ...] = (_flip, _set_byte, _truncate, _delete, _repeat, _splice)
EDITS += (_overwrite_int, _insert_int, _digits)


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """Copies of `data` with one to six edits: flipped bits, cuts, splices, extreme integers.

    Half of the edits fall within 256 bytes of either end: headers and directories are there.
    """
    length = len(data)
    near = st.integers(0, min(256, length) - 1)
    places = st.integers(0, length - 1) | near | near.map(lambda back: length - 1 - back)
    edit = st.tuples(st.sampled_from(EDITS), places, st.integers(0, 2**16 - 1))

    def apply(edits: list[tuple[Edit, int, int]]) -> bytes:
        damaged = bytearray(data)
        for change, at, value in edits:
            if at < len(damaged):
                change(damaged, at, value)
        return bytes(damaged)

    return st.lists(edit, min_size=1, max_size=6).map(apply)


def reshaped(
    arrays: dict[str, np.ndarray], kind: int, which: int, value: int, dtypes: Sequence[Any]
) -> None:
    """Damage to a file's arrays: one is missing, cut, or of another type or shape.

    Args:
        kind: from 0, which damage; higher ones than there are change nothing.
        which, value: of which array, and how much.
        dtypes: other types.
    """
    name = sorted(arrays)[which % len(arrays)]
    array = arrays[name]
    axis = value % max(1, array.ndim)
    match kind:
        case 0:
            del arrays[name]
        case 1 if array.ndim:
            arrays[name] = np.take(array, range(value % (array.shape[axis] + 1)), axis=axis)
        case 2:
            with np.errstate(all="ignore"):
                arrays[name] = array.astype(np.float32).astype(dtypes[value % len(dtypes)])
        case 3:
            arrays[name] = (array[None], array[..., None], array.reshape(-1))[value % 3]
        case 4 if array.ndim > 1:
            arrays[name] = np.swapaxes(array, 0, (1, -1)[value % 2])


SHAPE_EDITS = 5  # kinds of `reshaped`


def check_reader(open_fn: Callable[[Path], Checkpoint], data: bytes, tmp_path: Path) -> bool:
    """Opens `data` as a file and reads every tensor; True where the reader accepted the file.

    Anything but success or `CheckpointError` is raised, as is too much time or memory.
    """
    path = tmp_path / "damaged.bin"
    path.write_bytes(data)
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.process_time()
    try:
        accepted = _read_all(open_fn, path)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"took {seconds:.1f} s for {len(data)} bytes"
    assert peak < MEMORY + MEMORY_PER_BYTE * len(data), f"took {peak} bytes for {len(data)}"
    return accepted


def _read_all(open_fn: Callable[[Path], Checkpoint], path: Path) -> bool:
    try:
        checkpoint = open_fn(path)
        for tensor in checkpoint.tensors.values():
            assert tensor.read().shape == tensor.shape
            assert tensor.raw().nbytes == tensor.nbytes
    except CheckpointError:
        return False
    return True


def fuzz_settings(examples: int) -> settings:
    """Hypothesis' settings for `examples` files: no deadline, nothing kept, no health checks."""
    quiet = list(HealthCheck)
    return settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=quiet
    )


def fuzz(
    open_fn: Callable[[Path], Checkpoint], seeds: Sequence[bytes], tmp_path: Path, examples: int
) -> None:
    """Runs `check_reader` on `examples` damaged copies of `seeds`, after the seeds themselves."""
    for seed in seeds:
        assert check_reader(open_fn, seed, tmp_path), "an undamaged seed was refused"

    @fuzz_settings(examples)
    @given(st.one_of([mutations(seed) for seed in seeds]))
    def run(data: bytes) -> None:
        check_reader(open_fn, data, tmp_path)

    run()
