"""The kernels' benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import jax
import pytest

from tools import bench_kernels


def test_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert bench_kernels.main([]) == 2
    assert capsys.readouterr().err == "error: this needs a GPU; JAX found cpu\n"


@pytest.mark.parametrize("name", ["3.5", "8", "Q6_K", "IQ4_XS"])
def test_what_is_timed_fits_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "seconds", lambda run: run())
    format = bench_kernels.OF_WEIGHTS[name]
    y = jax.eval_shape(lambda: bench_kernels.time_product(format, 4096, 4096, 8, "triton"))
    assert y.shape == (8, 4096)


@pytest.mark.parametrize("kind", ["bf16", "q3.5"])
@pytest.mark.parametrize(("decoding", "prompt"), [(0, 3), (16, 0), (3, 13)])
def test_attention_that_is_timed_fits_together(
    kind: str, decoding: int, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 sequences, in as many batches as that is, or one batch of more."""
    monkeypatch.setattr(bench_kernels, "seconds", lambda run: 16.0 * run().size)
    numbers, sequences = 32 * 128, decoding + (prompt > 0)
    took, size = 0.0, 0

    def shapes() -> jax.Array:
        nonlocal took, size
        took, size = bench_kernels.time_attention(kind, 1024, decoding, prompt)
        return jax.numpy.zeros(())

    jax.eval_shape(shapes)
    assert took == (decoding + prompt) * numbers * sequences
    bits = {"bf16": 16, "q3.5": 3.5 + 2 * 16 / 32}[kind]
    assert size == sequences * 2 * 8 * 1024 * 128 * bits / 8
