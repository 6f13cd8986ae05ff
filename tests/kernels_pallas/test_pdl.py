"""Kernels let the next one begin on GPUs that can do that, and on no others."""

from __future__ import annotations

import jax
import pytest

from jinfer.quant_format import QuantFormat
from tests.kernels_pallas.targets import (
    attention,
    dense_experts,
    entering,
    one,
    rows,
    thresholds,
    whole,
)

KERNELS = {
    "product": one(QuantFormat("4"), 1),
    "decoding": whole("q4"),
    "rows": rows("gate", "4"),
    "entering": entering(1),
    "attention": attention("bf16"),
    "experts": dense_experts(8),
    "thresholds": thresholds(3000),
}


@pytest.mark.parametrize(
    ("kind", "early"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100", False)]
)
@pytest.mark.parametrize("name", KERNELS)
def test_the_next_kernel_may_begin(name: str, kind: str, *, early: bool) -> None:
    target = KERNELS[name]
    device = jax.sharding.AbstractDevice(kind, 1, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(target.function).trace(*target.args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("griddepcontrol.launch_dependents") == early * text.count("num_warps")
