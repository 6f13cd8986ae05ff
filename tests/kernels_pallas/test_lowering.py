"""Every kernel lowers for CUDA, which jaxlib does without a GPU."""

from __future__ import annotations

import jax
import pytest

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.quant_format import QuantFormat
from tests.kernels_pallas.helpers import H200, KINDS, WIDTHS
from tests.kernels_pallas.targets import (
    Target,
    adapters,
    attention,
    dense_experts,
    entering,
    experts,
    gated,
    of_gguf,
    one,
    rows,
    several,
    thresholds,
    whole,
)

# Every width with one kind of blocks, and some kinds of caches, which differ in their codes alone.
BLOCKS = [(32, False), (128, True)]
OF_GGUF = ("Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")
SOME = [
    *(one(QuantFormat(width, *BLOCKS[n % 2]), 1) for n, width in enumerate(WIDTHS)),
    one(QuantFormat("4"), 64),
    *(of_gguf(name, 1) for name in OF_GGUF),
    several("4"),
    whole("q3.5"),
    gated("3.5"),
    experts("4"),
    dense_experts(8),
    adapters(),
    rows("norm", "3.5", 3),
    rows("gate", "4"),
    thresholds(3000),
    entering(2, adjacent=True),
    *(attention(kind) for kind in ("bf16", "q3.5")),
    attention("bf16", dim=96, softcap=30.0, name="softcap"),
    attention("q8", tokens=5, changed=True, softcap=30.0, name="all"),
    attention("q3", tokens=200, dim=192),
    attention("q3.5", dim=40),
    attention("q6", dim=576, heads=(128, 1), shared=True, name="latent"),
    attention("bf16", part=True, name="part"),
    attention("q8", tokens=200, changed=True, part=True, name="part of many"),
]
OTHERS = [
    *(one(QuantFormat(width, *BLOCKS[1 - n % 2]), 1) for n, width in enumerate(WIDTHS)),
    *(of_gguf(name, 1) for name in GGUF if name not in OF_GGUF),
    *(attention(kind) for kind in KINDS if kind not in ("bf16", "q3.5")),
]


@pytest.mark.parametrize(
    "target",
    [*SOME, *(pytest.param(target, marks=pytest.mark.soak) for target in OTHERS)],
    ids=lambda target: target.name,
)
def test_lowers(target: Target) -> None:
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(target.function).trace(*target.args).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()
