"""Half a decoder layer as a chain of matmuls, and in NumPy.

`python -m tests.kernels_pallas.chains ROWS PROGRAMS CONSUMERS` runs one, interpreted, and prints
its largest errors. A process of its own, because the interpreter's threads wait for each other
inside of XLA, which needs more threads ($NPROC) than a small machine has cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.modelspec.quant_format import QuantFormat
from kernels_pallas.matmul.chain import ChainLink, PartialSums, choose_cut
from kernels_pallas.matmul.persistent import run_chain
from kernels_pallas.matmul.prologue import PrologueOperand, identity
from kernels_pallas.matmul.weight_layout import PackedMatrix
from tests.arrays import on_device
from tests.kernels_pallas.helpers import H200, random_matrix

WIDTH, WIDE, OUT = 1024, 2048, 192
_EPS = 1e-5


def after_attention(
    given: Any, residual: Any, weight: Any, index: Any, matrices: Sequence[PackedMatrix]
) -> list[ChainLink]:
    """Output, norm, gate and up, activation, down; the residual sum is a further result."""
    o, gate, up, down = matrices
    width = o.outputs

    def norm(values: Any, reductions: Any) -> list[Array]:
        x, added, scale = values
        x = x + added.astype(x.dtype)
        y = x.astype(jnp.float32)
        return [y * jax.lax.rsqrt(reductions.sum(y * y) / width + _EPS) * scale, x]

    def activation(values: Any, _: Any) -> list[Array]:
        return [jax.nn.silu(values[0]) * values[1]]

    x, before, scale = (
        PrologueOperand(given, "full"),
        PrologueOperand(residual, "full"),
        PrologueOperand(weight, "vector"),
    )
    both, kept = (PartialSums(1, 0), PartialSums(1, 1)), (residual.dtype,)
    return [
        ChainLink((x,), identity, (o,), index, reduces=False),
        ChainLink((before, PartialSums(0, 0), scale), norm, (gate, up), index, kept),
        ChainLink(both, activation, (down,), index, reduces=False),
    ]


def errors(rows: int, programs: int, consumers: int) -> dict[str, float]:
    """Largest errors of the sums and of the residual, over their root mean squares."""
    shapes = [(WIDTH, WIDTH), (WIDE, WIDTH), (WIDE, WIDTH), (OUT, WIDE)]
    built = [random_matrix(QuantFormat("4"), (2, *shape), n) for n, shape in enumerate(shapes)]
    rng = np.random.default_rng(0)
    given, residual = (rng.standard_normal((rows, WIDTH)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(WIDTH).astype(np.float32)

    @jax.jit
    def run(*arrays: Any) -> tuple[Array, Array]:
        links = after_attention(*arrays)
        cut = replace(choose_cut(links, rows, programs), consumers=consumers, stages=3, x_stages=2)
        found = run_chain(links, rows, cut, interpret=True)
        return jnp.sum(found.parts[-1][0], axis=0)[:rows], found.extra[1][0]

    arrays = [on_device(each) for each in (given, residual, weight)]
    with jax.sharding.use_abstract_mesh(H200):
        y, kept = run(*arrays, on_device([1], jnp.int32), [matrix for matrix, _ in built])
    o, gate, up, down = (values[1] for _, values in built)
    x = residual + given @ o.T
    n = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + _EPS) * weight
    a = n @ gate.T
    wanted = (a / (1 + np.exp(-a)) * (n @ up.T)) @ down.T
    return {"sums": _error(y, wanted), "residual": _error(kept, x)}


def _error(found: Any, wanted: np.ndarray) -> float:
    difference = np.abs(np.asarray(found, np.float64) - wanted).max()
    return float(difference / np.sqrt((wanted**2).mean()))


if __name__ == "__main__":
    print(json.dumps(errors(*map(int, sys.argv[1:]))))
