"""Pallas' Triton-style operations; None once JAX, which has deprecated them, drops them."""

from __future__ import annotations

import importlib
from typing import Any, Literal

type Backend = Literal["triton", "mosaic", "xla"]


def _operations() -> Any:
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None


plt = _operations()
DEFAULT: Backend = "mosaic" if plt is None else "triton"
