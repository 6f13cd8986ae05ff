"""Every test of a custom call runs in memory that is not zero by chance."""

import ctypes
import platform
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _memory_is_poisoned() -> Iterator[None]:
    """Fresh memory holds 3.4e38 in every float32: what a kernel does not write shows."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.libc_ver()[0] else None
    if mallopt is not None:
        mallopt(-6, 0x80)  # M_PERTURB
    yield
    if mallopt is not None:
        mallopt(-6, 0)
