"""Reading of memory, which benchmarks compare with."""

import numpy as np
import pytest

from jinfer.cpu import build_library, library_calls

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")


@pytest.mark.parametrize("ahead", library_calls.AHEAD)
def test_every_line_is_read(ahead: int) -> None:
    lines = np.zeros((100, 8), np.uint64)
    lines[:, 0] = np.uint64(1) << (np.arange(100, dtype=np.uint64) % np.uint64(64))
    assert library_calls.read_memory(lines[:64], ahead) == 2**64 - 1
    assert library_calls.read_memory(lines[1:64], ahead) == 2**64 - 2
    assert library_calls.read_memory(lines[:0], ahead) == 0
