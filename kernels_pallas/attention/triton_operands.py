"""Operands and static configuration of the Triton-style attention kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels_pallas.attention.grid import KernelLaunch
from kernels_pallas.attention.kv_layout import PackedKV


class TokenMetadata(NamedTuple):
    """Metadata of each token of the batch, int32 [tokens].

    Attributes:
        rows: its row of the block tables; -1 for padding.
        positions: in its sequence.
        low, last: the first and last key it sees.
        power: its splits are 2 ** power keys each.
        place: index of its sums among the tokens whose splits are written to memory.
    """

    rows: Any
    positions: Any
    low: Any
    last: Any
    power: Any
    place: Any


class ScoreOperands(NamedTuple):
    """Operands of score modifiers; each may be None.

    Attributes:
        factors: what each line of queries was divided by.
        slopes: ALiBi slope of each head.
        by_distance: [heads, distances], a bias.
    """

    factors: Any
    slopes: Any
    by_distance: Any


class KernelOperands(NamedTuple):
    """The kernel's operands."""

    firsts: Any
    tokens: TokenMetadata
    tables: Any
    q: Any
    changes: ScoreOperands
    sinks: Any
    keys: list[Any]
    values: list[Any] | None


class TritonConfig(NamedTuple):
    """Compile-time configuration of a kernel; of keys and values only their form.

    With `partial` a block may be -1, which is masked, and results are partial sums.
    """

    keys: PackedKV
    values: PackedKV | None
    heads: int
    scale: float
    softcap: float | None
    lowest: int
    launch: KernelLaunch
    splits: int
    asm: bool
    partial: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, count) of the numbers of each tile of the results."""
        return (self.keys if self.values is None else self.values).spans()
