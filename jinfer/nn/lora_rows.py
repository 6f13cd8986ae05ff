"""LoRA adapters in linear projections: their stacked parameters, and the rows of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jinfer.ops.matmul.lora import RowAdapters

LORA_A, LORA_B = "lora_a", "lora_b"
LORA_FACTORS = "lora_factors"  # factors of int8 matrices: one per row of A, and of B
DORA_NORMS = "dora_norms"


@dataclass(frozen=True)
class AdapterSlots:
    """Number, rank and dtype of an engine's LoRA adapter slots.

    Attributes:
        count: slots, each for one adapter.
        rank: rank of all slots; adapters of a lower rank are padded with zeros.
        dtype: dtype of the matrices; int8 matrices have factors.
        experts: whether slots include terms of experts' matrices.
        magnitudes: whether slots include DoRA's magnitudes.
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
    """Gives projections that are built within the context parameters for adapters."""
    token = _BUILT.set(slots)
    try:
        yield
    finally:
        _BUILT.reset(token)


def slots_to_build() -> AdapterSlots | None:
    """Returns the adapter slots of projections built now; None: no adapters."""
    return _BUILT.get()


@contextmanager
def rows_adapted_by(rows: RowAdapters | None) -> Iterator[None]:
    """Makes projections that this thread calls within the context add these rows' adapters."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def row_adapters() -> RowAdapters | None:
    """Returns the adapters of the rows computed now; None: no adapters."""
    return _ROWS.get()


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to adapters."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}", f".{LORA_FACTORS}", f".{DORA_NORMS}"))
