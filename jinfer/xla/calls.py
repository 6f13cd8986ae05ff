"""Custom calls, as XLA knows them by name."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jaxlib
from jaxlib import xla_client

_TYPED = 1  # XLA's interface for calls that say what they take


def include_dir() -> str:
    """Where the headers are that calls are compiled against."""
    return str(Path(jaxlib.__path__[0]) / "include")


def register_call(name: str, function: Any) -> None:
    """Makes a handler in a shared library known to XLA:CPU.

    Args:
        function: of a `ctypes.CDLL`.
    """
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype = ctypes.py_object
    wrap.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = wrap(ctypes.cast(function, ctypes.c_void_p), None, None)
    xla_client.register_custom_call_target(name, capsule, "cpu", _TYPED)
