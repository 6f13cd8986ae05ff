"""Persistent kernel benchmark: `python -m tools.bench_chain [--json FILE]`.

What follows an attention in Llama 3 8B's layer (output, norm, gate and up, activation, down) in q4,
layer after layer: by kernels of their own, and as one persistent kernel for several cuts.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.modelspec.quant_format import QuantFormat
from kernels_pallas.matmul.chain import ChainCut, ChainLink, ChainResult, PartialSums, choose_cut
from kernels_pallas.matmul.chain_links import run_links
from kernels_pallas.matmul.persistent import run_chain
from kernels_pallas.matmul.prologue import PrologueOperand, identity
from kernels_pallas.matmul.weight_layout import PackedMatrix

from .bench_kernels import check_gpu, copy_rate, random_stack, seconds, write
from .run_main import run

WIDTH, WIDE = 4096, 14336
LAYERS = 8
_EPS = 1e-5
_TOLERANCE = 0.02  # of a result, in its root mean square

type Stacks = Sequence[PackedMatrix]
type RunLinks = Callable[[Sequence[ChainLink], int], ChainResult]


def stacks(layers: int, width: int, wide: int) -> list[PackedMatrix]:
    """Random matrices: output, gate, up and down of each layer."""
    shapes = [(width, width), (wide, width), (wide, width), (width, wide)]
    return [random_stack(QuantFormat("4"), layers, *shape) for shape in shapes]


def layer_links(x: Array, residual: Array, index: Array, matrices: Stacks) -> list[ChainLink]:
    """The links of a layer, from an attention's result on."""
    o, gate, up, down = matrices
    width = o.outputs

    def norm(values: Any, reductions: Any) -> list[Array]:
        before, added = values
        after = before + added.astype(before.dtype)
        wide = after.astype(jnp.float32)
        scale = lax.rsqrt(reductions.sum(wide * wide) / width + _EPS)
        return [wide * scale, after]

    def activation(values: Any, _: Any) -> list[Array]:
        return [jax.nn.silu(values[0]) * values[1]]

    sums = PartialSums(1, 0), PartialSums(1, 1)
    return [
        ChainLink((PrologueOperand(x, "full"),), identity, (o,), index, reduces=False),
        ChainLink(
            (PrologueOperand(residual, "full"), PartialSums(0, 0)),
            norm,
            (gate, up),
            index,
            (residual.dtype,),
        ),
        ChainLink(sums, activation, (down,), index, reduces=False),
    ]


def layers_of(links: RunLinks, rows: int, count: int) -> Callable[[Array, Stacks], Array]:
    """A function of all layers, each of which waits for the one before."""

    @jax.jit
    def layers(x: Array, matrices: Stacks) -> Array:
        def one(i: Array, x: Array) -> Array:
            index = jnp.reshape(i, (1,)).astype(jnp.int32)
            found = links(layer_links(x, x, index, matrices), rows)
            down = jnp.sum(found.parts[-1][0], axis=0)[:rows]
            y = found.extra[1][0] + down.astype(x.dtype)
            wide = y.astype(jnp.float32)
            return (wide / jnp.sqrt(jnp.mean(wide * wide))).astype(x.dtype)

        return lax.fori_loop(0, count, one, x)

    return layers


def cuts(links: Sequence[ChainLink], rows: int, programs: int) -> Iterator[ChainCut]:
    """The chosen cut, and others in which one thing is different."""
    best = choose_cut(links, rows, programs)
    yield best
    for consumers in (1, 4):
        yield replace(best, consumers=consumers)
    for stages, x_stages in ((3, 4), (4, 4), (2, 4)):
        yield replace(best, stages=stages, x_stages=x_stages)
    norms = tuple(link.reduces and not any(best.alone) for link in links)
    yield replace(best, alone=norms)  # computed by every program, or by none
    for n, link in enumerate(links):
        for split in range(1, link.superblocks + 1):
            if link.superblocks % split == 0 and split != best.split[n]:
                yield replace(best, split=(*best.split[:n], split, *best.split[n + 1 :]))


def measure(
    rows: Sequence[int], *, layers: int = LAYERS, width: int = WIDTH, wide: int = WIDE, **how: Any
) -> dict[str, Any]:
    """All results: seconds of a layer, and whether results are those of single kernels.

    Args:
        how: programs of the persistent kernel, and whether kernels are interpreted.
    """
    copied = copy_rate()
    programs, interpret = how.get("programs") or _multiprocessors(), how.get("interpret", False)
    matrices = stacks(layers, width, wide)
    size = sum(matrix.nbytes for matrix in matrices)
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "copy": copied, "cuts": []}
    print("rows        µs  of copy  cut")
    for count in rows:
        x = jax.random.normal(jax.random.key(1), (count, width), jnp.bfloat16)
        links = jax.eval_shape(lambda x: x, x) and layer_links(
            x, x, jnp.zeros((1,), jnp.int32), matrices
        )
        wanted: np.ndarray | None = None
        for cut in (None, *cuts(links, count, programs)):

            def chain(
                links: Sequence[ChainLink], rows: int, cut: ChainCut | None = cut
            ) -> ChainResult:
                if cut is None:
                    return run_links(links, rows, interpret=interpret)
                return run_chain(links, rows, cut, interpret=interpret)

            row: dict[str, Any] = {"rows": count, "cut": None if cut is None else asdict(cut)}
            try:
                function = layers_of(chain, count, layers)
                found = np.asarray(function(x, matrices), np.float32)
                took = seconds(functools.partial(function, x, matrices)) / layers
            except Exception as error:  # a cut may need more than there is
                row["error"] = str(error).splitlines()[0]
                print(f"{count:4} {row['error'][:80]} {cut}", flush=True)
                result["cuts"].append(row)
                continue
            wanted = found if wanted is None else wanted
            close = float(np.sqrt(np.mean((found - wanted) ** 2))) < _TOLERANCE
            row |= {"seconds": took, "of_copy": size / took / copied, "close": close}
            result["cuts"].append(row)
            said = "kernels of their own" if cut is None else str(cut)
            note = "" if close else "  OTHER RESULTS"
            print(f"{count:4} {took * 1e6:9.1f} {row['of_copy']:8.0%}  {said}{note}", flush=True)
    return result


def _multiprocessors() -> int:
    return int(jax.devices()[0].core_count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    return run(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Times a layer's matmuls as one persistent kernel, for several cuts.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument("--rows", nargs="+", type=int, choices=range(1, 9), default=[1, 8])
    return parser


def _run(options: argparse.Namespace) -> int:
    check_gpu()
    write(options.json, measure(options.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
