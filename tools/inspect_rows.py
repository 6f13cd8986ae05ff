"""Inspect rows: what a report says of each tensor, and of parameters without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.weights.grouped_blocks import described, grouped_format, kept_blocks


@dataclass
class TensorRow:
    """A tensor of the file.

    Attributes:
        parameters: the parameters it holds; "name[3]" is an index of a parameter's first axis.
        note: "", "unused", "ignored", "wrong shape" or "differs"; of a native one, its original
            type.
    """

    tensor: Tensor
    parameters: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def becomes(self) -> str:
        """What a matrix of a quantized checkpoint is in memory by default; "" for all others."""
        if not self.tensor.sources:
            return ""
        if kept_blocks(self.tensor.scaled, self.tensor.shape[-1]) is not None:
            return "kept"
        found = grouped_format([self.tensor], exact=False)
        return "decoded" if found is None else f"as {described(found.format)}"

    @property
    def type(self) -> str:
        """How it is stored, and what becomes of it."""
        return f"{self.tensor.type}, {self.becomes}" if self.becomes else self.tensor.type


@dataclass(frozen=True)
class MissingParameter:
    """A parameter without a tensor; `names` are those looked for, empty if unmapped."""

    parameter: str
    shape: tuple[int, ...]
    names: tuple[str, ...]


class CheckpointRows(NamedTuple):
    """Tensors, parameters without one, and tensors of a wrong shape, one clause each."""

    rows: tuple[TensorRow, ...]
    missing: tuple[MissingParameter, ...]
    wrong: tuple[str, ...]
