"""Inspect rows: what a report says of each tensor, and of parameters without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jinfer.checkpoint import Tensor


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
