"""The benchmark of the persistent kernel, as far as it goes without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jinfer.modelspec.quant_format import QuantFormat
from tests.kernels_pallas.targets import shapes
from tools import bench_chain


def test_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert bench_chain.main([]) == 2
    assert capsys.readouterr().err == "error: this needs a GPU; JAX found cpu\n"


def test_cuts_that_are_tried() -> None:
    """Each once, the chosen one first, and only those that divide the inputs."""
    width, wide = bench_chain.WIDTH, bench_chain.WIDE
    sizes = ((width, width), (wide, width), (wide, width), (width, wide))
    matrices = [shapes(QuantFormat("4"), (8,), *size) for size in sizes]
    x, index = jnp.zeros((1, width), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    links = bench_chain.layer_links(x, x, index, matrices)
    found = list(bench_chain.cuts(links, 1, 132))
    assert len(set(found)) == len(found)
    for cut in found:
        assert all(
            link.superblocks % split == 0 for link, split in zip(links, cut.split, strict=True)
        )
    assert {cut.consumers for cut in found} == {1, 2, 4}
    assert {cut.split[2] for cut in found} == {1, 2, 7, 14}
