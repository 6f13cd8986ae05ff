"""A chain of quantized matmuls with a few rows, computed by one persistent kernel.

Between two attentions, a decoder layer is products whose inputs are row-wise functions of earlier
products' sums: output, norm, gate and up, activation, down, norm, queries, keys and values. A link
is such a function and the matrices that read its result. The kernel (`persistent`) has one program
per multiprocessor for all links, so that weights of the next link are copied into shared memory
while programs wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels_pallas.matmul.grid import MULTIPROCESSORS
from kernels_pallas.matmul.prologue import Compute, PrologueOperand
from kernels_pallas.matmul.weight_layout import BLOCKS, PackedMatrix

if TYPE_CHECKING:
    from jaxtyping import Float

SUPERBLOCK = 1024
OUTPUTS = 64  # of a tile: rows of a warp group's matmul
MOST_ROWS = 8  # columns of the narrowest tensor-core instruction
BITS = 4
_SHORT = 4  # superblocks of a row that one warp group computes in turn
LONGEST = 8192  # width of a row that one warp group reduces in registers


class PartialSums(NamedTuple):
    """An operand: what a matrix of an earlier link gave, still in parts.

    Attributes:
        link, matrix: numbers of the link, and of the matrix in it.
    """

    link: int
    matrix: int


class Intermediate(NamedTuple):
    """An operand: a further result of an earlier link's computation.

    Attributes:
        link, place: numbers of the link, and of the result in its `extra`.
    """

    link: int
    place: int


type ChainOperand = PrologueOperand | PartialSums | Intermediate


@dataclass(frozen=True)
class ChainLink:
    """A row-wise computation, and the matrices that its result is multiplied with.

    Attributes:
        operands: of the computation; kinds "full", "parts" and "vector" are as wide as x, "row" and
            "one" are not.
        compute: x, then further results; see `prologue.Compute`.
        matrices: that read x; they have the same inputs.
        index: int32 [1], which matrix of their stacks; None: the first.
        extra: types of the further results.
        reduces: whether `compute` uses reductions. If not, superblocks are computed apart.
    """

    operands: tuple[ChainOperand, ...]
    compute: Compute
    matrices: tuple[PackedMatrix, ...]
    index: Any = None
    extra: tuple[Any, ...] = ()
    reduces: bool = True

    @property
    def superblocks(self) -> int:
        """Superblocks of a row of x."""
        return self.matrices[0].superblocks

    @property
    def tiles(self) -> int:
        """Tiles of outputs of all matrices."""
        return sum(matrix.outputs for matrix in self.matrices) // OUTPUTS


class ChainResult(NamedTuple):
    """What a chain computes.

    Attributes:
        parts: of each link's matrices, partial sums; of `MOST_ROWS` rows.
        extra: of each link, the further results.
    """

    parts: tuple[tuple[Float[Any, "parts rows outputs"], ...], ...]
    extra: tuple[tuple[Float[Any, "rows width"], ...], ...]


@dataclass(frozen=True)
class ChainCut:
    """How work and shared memory are divided, once for all links.

    Attributes:
        programs: one per multiprocessor, all resident at once.
        split: of each link, split-K: parts of the inputs, each summed by itself. It divides the
            link's superblocks.
        consumers: warp groups that share the slices of a superblock: 1, 2 or 4.
        stages: tiles of weights (40 KiB) in shared memory, copied before they are needed.
        x_stages: superblocks of x (16 KiB) in shared memory.
        alone: links whose x each program computes for itself instead of waiting for the others.
    """

    programs: int
    split: tuple[int, ...]
    consumers: int = 2
    stages: int = 4
    x_stages: int = 3
    alone: tuple[bool, ...] = ()

    def computes_alone(self, link: int) -> bool:
        """Whether each program computes the link's x for itself."""
        return link < len(self.alone) and self.alone[link]


def chain_supports(matrices: Sequence[PackedMatrix]) -> bool:
    """Whether the kernel supports a link with these matrices: q4 in whole tiles."""
    first = matrices[0]
    return all(
        matrix.bits == BITS
        and matrix.levels == 1 << BITS
        and matrix.block == BLOCKS[0]
        and not matrix.symmetric
        and matrix.steps is None
        and matrix.codebook is None
        and matrix.inputs == matrix.padded_inputs == first.inputs
        and matrix.outputs % OUTPUTS == 0
        for matrix in matrices
    )


def choose_cut(links: Sequence[ChainLink], rows: int, programs: int = MULTIPROCESSORS) -> ChainCut:
    """The cut that leaves least to the program with the most tiles; ties go to fewer parts.

    With one row, what is short or reduces is computed by every program: that is faster than waiting
    for others twice.
    """
    split = tuple(_split(link, programs) for link in links)
    alone = tuple(rows == 1 and (link.reduces or link.superblocks <= _SHORT) for link in links)
    return ChainCut(programs, split, alone=alone)


def _split(link: ChainLink, programs: int) -> int:
    count = link.superblocks

    def most(split: int) -> int:
        """Tiles of the program that has most."""
        return -(-link.tiles * split // programs) * (count // split)

    return min((s for s in range(1, count + 1) if count % s == 0), key=lambda s: (most(s), s))
