"""Positions against their published definitions in NumPy."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.modelspec.position_blocks import (
    AlibiSpec,
    LearnedPositionsSpec,
    RopeScalingSpec,
    RopeSpec,
    SinusoidalPositionsSpec,
)
from jinfer.nn.positions import PositionTable, Rotary, Sinusoids, alibi_slopes, rope_frequencies
from tests.arrays import on_device
from tests.reference.numpy_positions import (
    Floats,
    alibi_slopes_ceil,
    alibi_slopes_floor,
    dynamic_ntk_theta,
    linear_frequencies,
    llama3_frequencies,
    longrope_attention_factor,
    rope,
    sinusoids_fairseq,
    sinusoids_marian,
    yarn_attention_factor,
    yarn_frequencies,
)
from tests.reference.numpy_positions import rope_frequencies as plain_frequencies

HEAD_DIM, CONTEXT = 16, 64
SHORT, LONG = tuple(np.linspace(1, 3, HEAD_DIM // 2)), tuple(np.linspace(2, 40, HEAD_DIM // 2))
POSITIONS = np.array([[0, 1, 2, 3], [7, 8, 300, 301]])
X = np.random.default_rng(0).normal(size=(2, 4, 3, HEAD_DIM))


def rotary(dim: int = HEAD_DIM, **fields: Any) -> Rotary:
    return Rotary(RopeSpec(kind="rope", dim=dim, **fields), jnp.float32)


def scaling(kind: Any, **fields: Any) -> RopeScalingSpec:
    return RopeScalingSpec(
        rope_type=kind, **{"factor": 4.0, "original_max_position_embeddings": CONTEXT} | fields
    )


def rotated(module: Rotary, x: Floats = X, totals: Any = (4, 302)) -> Floats:
    each = jnp.broadcast_to(on_device(totals)[:, None], np.shape(POSITIONS))
    cos_sin = module.cos_sin(on_device(POSITIONS), each)
    flat = on_device(x, jnp.float32).reshape(*x.shape[:2], -1)
    return np.asarray(module(flat, cos_sin, x.shape[-1]), np.float64).reshape(x.shape)


def expected(**arguments: Any) -> Floats:
    return np.stack([rope(x, at, **arguments) for x, at in zip(X, POSITIONS, strict=True)])


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize("dim", [2, 6, HEAD_DIM])
@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_rope(pairs: Literal["halves", "adjacent"], dim: int, theta: float) -> None:
    got = rotated(rotary(dim, pairs=pairs, theta=theta))
    assert_allclose(got, expected(pairs=pairs, rotary_dim=dim, theta=theta), atol=5e-5)
    assert np.array_equal(got[..., dim:], np.float32(X[..., dim:]))


def test_rope_keeps_the_type() -> None:
    """Angles are float32 whatever the type: a bfloat16 cannot tell position 300 from 301."""
    x = on_device(X, jnp.bfloat16)
    module = rotary()
    cos_sin = module.cos_sin(on_device(POSITIONS), jnp.full(np.shape(POSITIONS), 302))
    got = module(x.reshape(*x.shape[:2], -1), cos_sin, x.shape[-1])
    assert got.dtype == jnp.bfloat16
    assert_allclose(np.asarray(got, np.float64).reshape(x.shape), expected(), atol=0.03)


@pytest.mark.parametrize(
    ("scaled", "frequencies", "factor"),
    [
        (None, plain_frequencies(HEAD_DIM), 1.0),
        (scaling("default"), plain_frequencies(HEAD_DIM), 1.0),
        (scaling("linear"), linear_frequencies(plain_frequencies(HEAD_DIM), 4.0), 1.0),
        (
            scaling("llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=3.0),
            llama3_frequencies(plain_frequencies(HEAD_DIM), 8.0, 1.5, 3.0, CONTEXT),
            1.0,
        ),
        (
            scaling("yarn"),
            yarn_frequencies(HEAD_DIM, 1e4, 4.0, CONTEXT),
            yarn_attention_factor(4.0),
        ),
        (
            scaling("yarn", beta_fast=8.0, beta_slow=2.0, truncate=False, attention_factor=1.7),
            yarn_frequencies(HEAD_DIM, 1e4, 4.0, CONTEXT, 8.0, 2.0, truncate=False),
            1.7,
        ),
        (
            scaling("yarn", mscale=0.8, mscale_all_dim=0.5),
            yarn_frequencies(HEAD_DIM, 1e4, 4.0, CONTEXT),
            yarn_attention_factor(4.0, 0.8) / yarn_attention_factor(4.0, 0.5),
        ),
        (scaling("yarn", factor=1.0), plain_frequencies(HEAD_DIM), 1.0),
        (
            scaling("yarn", original_max_position_embeddings=200_000),  # the ramp ends beyond
            yarn_frequencies(HEAD_DIM, 1e4, 4.0, 200_000),
            yarn_attention_factor(4.0),
        ),
        (
            scaling("longrope", length=CONTEXT, short_factor=SHORT, long_factor=LONG),
            plain_frequencies(HEAD_DIM) / SHORT,
            longrope_attention_factor(4.0, CONTEXT),
        ),
        (
            scaling("longrope", length=CONTEXT + 1, short_factor=SHORT, long_factor=LONG),
            plain_frequencies(HEAD_DIM) / LONG,
            longrope_attention_factor(4.0, CONTEXT),
        ),
        (scaling("longrope", factor=1.0), plain_frequencies(HEAD_DIM), 1.0),
        (scaling("longrope", attention_factor=1.7), plain_frequencies(HEAD_DIM), 1.7),
    ],
    ids=[
        "none",
        "default",
        "linear",
        "llama3",
        "yarn",
        "yarn-exact",
        "yarn-mscale",
        "yarn-1",
        "yarn-long",
        "longrope-short",
        "longrope-long",
        "longrope-1",
        "longrope-factor",
    ],
)
def test_scaling(scaled: RopeScalingSpec | None, frequencies: Floats, factor: float) -> None:
    module = rotary(scaling=scaled)
    got, magnitude = rope_frequencies(module.block)
    assert_allclose(got, frequencies, rtol=1e-12)
    assert magnitude == pytest.approx(factor, rel=1e-12)
    wanted = expected(inv_freq=frequencies, attention_factor=factor)
    assert_allclose(rotated(module), wanted, atol=5e-5)


@pytest.mark.parametrize("dim", [2, 6, HEAD_DIM])
@pytest.mark.parametrize("totals", [(4, 302), (CONTEXT, CONTEXT + 1), (5000, 100_000)])
def test_dynamic_scaling(totals: tuple[int, int], dim: int) -> None:
    """Each sequence has the theta of its length; up to the context trained, that of the model."""
    thetas = [
        dynamic_ntk_theta(1e4, dim, 4.0, total, CONTEXT) if dim > 2 and total > CONTEXT else 1e4
        for total in totals
    ]
    wanted = [
        rope(x, at, rotary_dim=dim, theta=theta)
        for x, at, theta in zip(X, POSITIONS, thetas, strict=True)
    ]
    got = rotated(rotary(dim, scaling=scaling("dynamic")), totals=totals)
    assert_allclose(got, np.stack(wanted), atol=1e-4)
    plain = rotated(rotary(dim))
    unchanged = [dim == 2 or total <= CONTEXT for total in totals]
    assert [np.array_equal(a, b) for a, b in zip(got, plain, strict=True)] == unchanged


def test_factors_of_the_checkpoint_divide_the_frequencies() -> None:
    module = rotary(factors=True)
    factors = np.linspace(1, 9, HEAD_DIM // 2)
    module.factors.set_value(on_device(factors, jnp.float32))
    wanted = expected(inv_freq=plain_frequencies(HEAD_DIM) / factors)
    assert_allclose(rotated(module), wanted, atol=5e-5)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71])
def test_alibi_slopes(heads: int) -> None:
    slopes = alibi_slopes(heads, AlibiSpec(kind="alibi"))
    assert_allclose(slopes, alibi_slopes_floor(heads), rtol=1e-12)
    slopes = alibi_slopes(heads, AlibiSpec(kind="alibi", factor=0.25))
    assert_allclose(slopes, alibi_slopes_floor(heads) / 4, rtol=1e-12)
    slopes = alibi_slopes(heads, AlibiSpec(kind="alibi", max_bias=5.0))
    assert_allclose(slopes, alibi_slopes_ceil(heads, bias_max=5.0), rtol=1e-12)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions(offset: int) -> None:
    block = LearnedPositionsSpec(kind="learned_positions", size=CONTEXT, width=6, offset=offset)
    module = PositionTable(block, jnp.float32)
    table = np.random.default_rng(1).normal(size=(CONTEXT + offset, 6)).astype(np.float32)
    assert module.weight.shape == table.shape
    module.weight.set_value(on_device(table))
    at = np.array([[0, 1, 5], [CONTEXT - 2, CONTEXT - 1, 0]])
    assert np.array_equal(module(on_device(at)), table[at + offset])


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize(
    ("frequencies", "definition"),
    [("standard", sinusoids_marian), ("tensor2tensor", sinusoids_fairseq)],
)
def test_sinusoids(frequencies: Any, definition: Any, offset: int) -> None:
    block = SinusoidalPositionsSpec(
        kind="sinusoidal_positions", width=10, offset=offset, frequencies=frequencies
    )
    got = Sinusoids(block, jnp.float32)(on_device(POSITIONS))
    wanted = np.stack([definition(at + offset, 10) for at in POSITIONS])
    assert_allclose(got, wanted, atol=5e-5)
    assert Sinusoids(block, jnp.bfloat16)(on_device(POSITIONS)).dtype == jnp.bfloat16
