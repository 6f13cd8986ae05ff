"""Which formats matrices get under a budget, by their sizes and by what they lose.

Bits are those that a weight takes in memory on average over all matrices, embeddings and heads,
with scales and padding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import jax
import numpy as np

from jinfer.modelspec.quant_format import QuantFormat, parse_format
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from jinfer.weights.storage_plan import Storage

# More widths, or blocks of 32 and 128 too, lower the divergence by less than 1%. The GPU's kernels
# look up tables of 16 values only.
_FORMATS = ("q2_b64_nl", "q3_b64_nl", "q4_b64_nl", "q5_b64_sym", "q6_b64_sym", "q8_b64")
_GPU_FORMATS = ("q2_b64", "q3_b64", *_FORMATS[2:])


def candidates() -> list[QuantFormat]:
    """The formats to choose from, in ascending order of their bits."""
    return [parse_format(name) for name in (_GPU_FORMATS if backend() == "gpu" else _FORMATS)]


def with_one_format(
    model: AbstractModel, storages: Mapping[str, Storage], names: Collection[str], bits: float
) -> dict[str, Storage]:
    """Storages of these names in the widest format with which all together stay within the budget.

    Raises:
        ValueError: there is none.
    """
    every, least = matrices(model), 0.0
    for format in reversed(candidates()):
        own = {name: replace(storages[name], format=format) for name in names}
        least = _bits(model, {**storages, **own}, every)
        if least <= bits:
            return {**storages, **own}
    raise ValueError(f"the fewest bits are {least:.2f}, with scales and padding")


def choose(sizes: np.ndarray, losses: np.ndarray, room: float) -> list[int]:
    """Which format each matrix gets: from the narrowest on, what gains most for each bit.

    Args:
        sizes, losses: in bits and in divergence, [matrices, formats]; sizes ascend.
        room: for the sizes of all.
    """
    rows = np.arange(len(sizes))
    chosen = np.zeros(len(sizes), np.int64)
    while True:
        more = sizes - sizes[rows, chosen][:, None]
        gain = losses[rows, chosen][:, None] - losses
        left = room - sizes[rows, chosen].sum()
        rate = np.where((more > 0) & (more <= left), gain / np.maximum(more, 1), 0)
        best = int(rate.argmax())
        if rate.flat[best] <= 0:
            return chosen.tolist()
        chosen[best // sizes.shape[1]] = best % sizes.shape[1]


def matrices(model: AbstractModel) -> dict[str, tuple[int, ...]]:
    """The shapes of matrices, tables and heads by name."""
    each = zip(model.names, model.parameters, model.roles, strict=True)
    return {name: tuple(like.shape) for name, like, role in each if role != "plain"}


def _bits(
    model: AbstractModel, storages: Mapping[str, Storage], shapes: Mapping[str, tuple[int, ...]]
) -> float:
    """Bits of a weight."""
    size = sum(stored_size(model, storages, name) for name in shapes)
    return 8 * size / max(1, sum(map(prod, shapes.values())))


def stored_size(model: AbstractModel, storages: Mapping[str, Storage], name: str) -> int:
    """Bytes of a parameter."""
    like = model.parameters[model.names.index(name)]
    storage = storages.get(name)
    if storage is not None:
        return storage.abstract(like.shape).nbytes
    return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(like))
