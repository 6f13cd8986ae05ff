"""A chain of quantized matmuls by kernels of their own: two of each link."""

from __future__ import annotations

from collections.abc import Sequence

from kernels_pallas.matmul.chain import ChainLink, ChainResult, Intermediate, PartialSums
from kernels_pallas.matmul.prologue import PrologueOperand, prepare_rows
from kernels_pallas.matmul.quantized import matmul_partials


def run_links(links: Sequence[ChainLink], rows: int, *, interpret: bool = False) -> ChainResult:
    """`persistent.run_chain` with a prologue and a matmul kernel for each link."""
    found = ChainResult((), ())
    for link in links:
        operands = []
        for operand in link.operands:
            match operand:
                case PartialSums(earlier, matrix):
                    operands.append(PrologueOperand(found.parts[earlier][matrix], "parts"))
                case Intermediate(earlier, place):
                    operands.append(PrologueOperand(found.extra[earlier][place], "full"))
                case PrologueOperand():
                    operands.append(operand)
        given, extra = prepare_rows(
            operands, link.compute, rows, link.matrices[0], link.extra, interpret=interpret
        )
        parts = matmul_partials(given, link.matrices, index=link.index, interpret=interpret)
        found = ChainResult((*found.parts, parts), (*found.extra, extra))
    return found
