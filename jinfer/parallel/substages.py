"""Which layers of a stage are stages of their own, on the same devices.

Those whose weights are brought when they are needed, and those whose attention is computed in two
places, each have programs of their own; the layers between them stay together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jinfer.parallel.sharding_rules import Part


@dataclass(frozen=True)
class Piece:
    """Some of a stage's layers.

    Attributes:
        streamed: whether its weights stay in host memory.
        hosted: whether a part of its cache is there.
    """

    part: Part
    streamed: bool = False
    hosted: bool = False


def spread(layers: Collection[int], count: int) -> frozenset[int]:
    """So many of the layers, evenly: each is brought while those before it compute."""
    total = len(layers)
    return frozenset(
        layer for i, layer in enumerate(layers) if (i + 1) * count // total > i * count // total
    )


def pieces(part: Part, main: str, streamed: Collection[int], *, hosted: bool) -> list[Piece]:
    """A stage's pieces, in their order.

    Args:
        main: the stack that is cut; the layers of others stay with what comes first.
        streamed: layers of it whose weights stay in host memory.
        hosted: whether a part of each layer's cache is in host memory.
    """
    own = part.layers[main]
    runs: list[tuple[range, bool]] = []  # layers, and whether they are one that stands alone
    for layer in own:
        alone = hosted or layer in streamed
        if runs and not alone and not runs[-1][1]:
            runs[-1] = range(runs[-1][0].start, layer + 1), False
        else:
            runs.append((range(layer, layer + 1), alone))
    others = any(len(rows) for name, rows in part.layers.items() if name != main)
    if not runs or (runs[0][1] and (part.first or others)):
        runs.insert(0, (range(own.start, own.start), False))
    if runs[-1][1] and part.last:
        runs.append((range(own.stop, own.stop), False))
    found = []
    for index, (rows, alone) in enumerate(runs):
        first, last = index == 0, index == len(runs) - 1
        layers = {
            name: rows if name == main else each if first else range(each.stop, each.stop)
            for name, each in part.layers.items()
        }
        cut = Part(layers, part.first and first, part.last and last)
        found.append(Piece(cut, alone and rows.start in streamed, alone and hosted))
    return found
