"""Layout of the sampler's custom call: the columns and samplers that it knows, by name."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from jinfer.cpu.build_library import loaded


class Layout(NamedTuple):
    """What the custom call knows, in its order.

    Attributes:
        numbers, counts: the columns of a request's parameters.
        samplers: their names; a sampler's number is its index here.
    """

    numbers: tuple[str, ...]
    counts: tuple[str, ...]
    samplers: tuple[str, ...]


@functools.cache
def layout() -> Layout:
    """The layout of the library."""
    library = loaded()
    library.jinfer_sampler_layout.restype = ctypes.c_char_p
    names = library.jinfer_sampler_layout().decode().splitlines()
    return Layout(*(tuple(line.split()) for line in names))
