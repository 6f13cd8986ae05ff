"""Operator fusion on GPUs: matmuls that follow each other, as one persistent kernel.

With few rows, a matmul whose x is row-wise in what earlier ones gave is not computed at once: it
becomes a link of a chain, and so do those after it, until something else needs a result (an
attention does). Then one kernel computes them all (`kernels_pallas.matmul.persistent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.ops.fusion.jaxpr_walk import JaxprValue

if TYPE_CHECKING:
    from kernels_pallas.matmul.chain import ChainLink, ChainOperand, ChainResult
    from kernels_pallas.matmul.weight_layout import PackedMatrix

_HOPPER = 9  # compute capability


def supports_link(rows: int, matrices: Sequence[PackedMatrix], *, reduces: bool) -> bool:
    """Whether a matmul can be a link."""
    from kernels_pallas.matmul.chain import LONGEST, MOST_ROWS, chain_supports

    short = matrices[0].inputs <= LONGEST or not reduces
    return rows <= MOST_ROWS and short and chain_supports(matrices)


class MatmulChain:
    """Links that nothing has needed yet.

    Attributes:
        links: in order.
        rows: of all of them.
        places: where their results will be.
    """

    def __init__(self, rows: int = 0, *, interpret: bool = False) -> None:
        self.rows, self._interpret = rows, interpret
        self.links: list[ChainLink] = []
        self.places: dict[JaxprValue, ChainOperand] = {}

    def add(
        self, link: ChainLink, sums: Sequence[JaxprValue], further: Sequence[JaxprValue]
    ) -> None:
        """Appends a link.

        Args:
            sums: what its matrices give.
            further: the further results of its computation.
        """
        from kernels_pallas.matmul.chain import Intermediate, PartialSums

        number = len(self.links)
        self.links.append(link)
        self.places |= {slot: PartialSums(number, m) for m, slot in enumerate(sums)}
        self.places |= {slot: Intermediate(number, m) for m, slot in enumerate(further)}

    def run(self) -> tuple[dict[JaxprValue, Array], dict[JaxprValue, Array]]:
        """Computes all links: partial sums, and further results."""
        from kernels_pallas.matmul.chain import Intermediate, PartialSums

        parts, extra = self._results()
        sums: dict[JaxprValue, Array] = {}
        further: dict[JaxprValue, Array] = {}
        for slot, place in self.places.items():
            match place:
                case PartialSums(link, matrix):
                    sums[slot] = parts[link][matrix]
                case Intermediate(link, number):
                    further[slot] = extra[link][number].reshape(slot.aval.shape)
        return sums, further

    def _results(self) -> ChainResult:
        """By the persistent kernel, or a single link by the kernels of one matmul."""
        from kernels_pallas.matmul import chain, chain_links, persistent

        if len(self.links) == 1:
            return chain_links.run_links(self.links, self.rows, interpret=self._interpret)
        cut = chain.choose_cut(self.links, self.rows, _multiprocessors())
        return persistent.run_chain(self.links, self.rows, cut, interpret=self._interpret)


def has_hopper() -> bool:
    """Whether the device, if there is one, has the instructions of the persistent kernel."""
    device = jax.devices()[0]
    return device.platform != "gpu" or int(device.compute_capability.split(".")[0]) == _HOPPER


def _multiprocessors() -> int:
    from kernels_pallas.matmul.grid import MULTIPROCESSORS

    device = jax.devices()[0]
    return int(device.core_count) if device.platform == "gpu" else MULTIPROCESSORS


def sum_rows(parts: Array, rows: int) -> Array:
    """The sum of partial sums [parts, rows or more, width]."""
    return jnp.sum(parts, axis=0)[:rows]
