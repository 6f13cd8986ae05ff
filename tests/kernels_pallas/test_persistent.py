"""Chains of matmuls: how work is cut, and the persistent kernel, interpreted, against NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jinfer.modelspec.quant_format import QuantFormat
from kernels_pallas.matmul.chain import ChainLink, chain_supports, choose_cut
from kernels_pallas.matmul.grid import MULTIPROCESSORS
from kernels_pallas.matmul.prologue import identity
from tests.kernels_pallas.targets import shapes

ROW_ERROR = 1e-2  # of a sum, in root mean squares: weights and x are fp16


def link(outputs: int, inputs: int, *, reduces: bool = False) -> ChainLink:
    matrix = shapes(QuantFormat("4"), (), outputs, inputs)
    return ChainLink((), identity, (matrix,), reduces=reduces)


def test_no_program_has_much_more_than_others() -> None:
    """Llama 3 8B's layer on the multiprocessors of an H200."""
    links = [link(4096, 4096), link(2 * 14336, 4096, reduces=True), link(4096, 14336)]
    cut = choose_cut(links, 1)
    assert cut.alone == (True, True, False)
    assert choose_cut(links, 2).alone == (False, False, False)
    for each, split in zip(links, cut.split, strict=True):
        assert each.superblocks % split == 0
        most = -(-each.tiles * split // MULTIPROCESSORS) * (each.superblocks // split)
        assert most < 1.05 * each.tiles * each.superblocks / MULTIPROCESSORS


def test_what_a_link_can_be() -> None:
    def one(name: str, outputs: int = 64, inputs: int = 1024) -> bool:
        format = QuantFormat(name.removesuffix("_sym"), symmetric=name.endswith("_sym"))  # type: ignore[arg-type]
        return chain_supports([shapes(format, (), outputs, inputs)])

    assert one("4")
    assert not one("4_sym")
    assert not one("8")
    assert not one("4", outputs=72)
    assert not one("4", inputs=1000)


@pytest.mark.parametrize(
    ("rows", "programs", "consumers"),
    [
        (1, 1, 2),
        pytest.param(1, 3, 1, marks=pytest.mark.soak),
        pytest.param(3, 3, 2, marks=pytest.mark.soak),
        pytest.param(8, 1, 4, marks=pytest.mark.soak),
    ],
)
def test_half_a_layer(rows: int, programs: int, consumers: int) -> None:
    """One program computes all links in one launch; several, one step a launch."""
    program = [sys.executable, "-m", "tests.kernels_pallas.chains"]
    numbers = map(str, (rows, programs, consumers))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "8"}
    out = subprocess.run(
        [*program, *numbers], capture_output=True, text=True, check=True, env=environment
    ).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["residual"] < ROW_ERROR
    assert found["sums"] < 2 * ROW_ERROR
