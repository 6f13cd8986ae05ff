"""Every kernel lowers for CUDA, which jaxlib does without a GPU."""

from __future__ import annotations

from itertools import product

import jax
import pytest

from jinfer.quant.format import QuantFormat
from tests.kernels_pallas.helpers import H200, KINDS, WIDTHS
from tests.kernels_pallas.targets import Target, attention, experts, gated, one, several

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

TARGETS = [
    *(
        one(QuantFormat(width, block, kind), 1)
        for width, (block, kind) in product(WIDTHS, [(32, False), (128, True)])
    ),
    one(QuantFormat("4"), 64),
    *(one(QuantFormat(width), 1, "mosaic") for width in WIDTHS),
    several("4"),
    gated("3.5"),
    experts("4"),
    *(attention(kind) for kind in KINDS),
    attention("bf16", dim=96, softcap=30.0, name="softcap"),
    attention("q8", tokens=5, changed=True, softcap=30.0, name="all"),
    attention("q3", tokens=200, dim=192),
    attention("q3.5", dim=40),
    attention("q6", dim=576, heads=(128, 1), shared=True, name="latent"),
    attention("bf16", part=True, name="part"),
    attention("q8", tokens=200, changed=True, part=True, name="part of many"),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_lowers(target: Target) -> None:
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(target.function).trace(*target.args).lower(lowering_platforms=("cuda",))
    name = "mosaic_gpu" if "mosaic" in target.name else "xla.gpu.triton"
    assert name in lowered.as_text()
