"""LoRA adapters in linear projections: their stacked parameters, and the rows of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jinfer.ops.matmul.lora import RowAdapters

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_FACTORS = "lora_factors"  # of matrices in int8: those of A's rows, and of B's
DORA_NORMS = "dora_norms"


@dataclass(frozen=True)
class AdapterSlots:
    """How many adapters an engine holds, and of which rank.

    Attributes:
        count: slots, each of which holds an adapter.
        rank: of all of them; adapters of a lower rank are padded with zeros.
        dtype: of their matrices; int8: these have factors.
        experts: whether there is room for terms of experts' matrices.
        magnitudes: whether there is room for DoRA's magnitudes.
    """

    count: int
    rank: int
    dtype: str
    experts: bool = False
    magnitudes: bool = False


_BUILT: ContextVar[AdapterSlots | None] = ContextVar("adapter_slots", default=None)
_ROWS: ContextVar[RowAdapters | None] = ContextVar("row_adapters", default=None)


@contextmanager
def building_with(slots: AdapterSlots | None) -> Iterator[None]:
    """Projections built within have parameters for adapters."""
    token = _BUILT.set(slots)
    try:
        yield
    finally:
        _BUILT.reset(token)


def slots_to_build() -> AdapterSlots | None:
    """What projections that are built now have room for; None: no adapters."""
    return _BUILT.get()


@contextmanager
def rows_adapted_by(rows: RowAdapters | None) -> Iterator[None]:
    """Projections called within by this thread add the adapters of these rows."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def row_adapters() -> RowAdapters | None:
    """The adapters of the rows that are computed now; None: there are none."""
    return _ROWS.get()


def is_adapter(name: str) -> bool:
    """Whether a parameter is of adapters."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}", f".{LORA_FACTORS}", f".{DORA_NORMS}"))
