"""The rule keeps the model's distribution, and the usual one does not where noise is shared."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.sampling.rng import noise
from tests.arrays import on_device

VOCAB, TOKENS, SEEDS = 8, 3, 100_000
# Of chi-square with 511 degrees of freedom, above which chance comes once in a million times.
MOST = 678.0


def tables(seed: int) -> list[np.ndarray]:
    """Log-probabilities of each token after every text, [8 ** i, 8]."""
    rng = np.random.default_rng(seed)
    each = [rng.normal(size=(VOCAB**i, VOCAB)) for i in range(TOKENS)]
    return [x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in each]


def gumbel(place: int) -> np.ndarray:
    """The noise of a token for every seed."""
    seeds = np.arange(SEEDS, dtype=np.uint32)
    keys = on_device(np.stack([np.zeros_like(seeds), seeds], axis=1))
    return np.asarray(noise(keys, jnp.full(SEEDS, place, jnp.int32), VOCAB))


def chi_square(texts: np.ndarray, p: list[np.ndarray]) -> float:
    """How far counts of texts are from what they should be; rare ones together."""
    exact = np.zeros(VOCAB**TOKENS)
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        place, logprob = 0, 0.0
        for i, token in enumerate(text):
            logprob += p[i][place, token]
            place = place * VOCAB + token
        exact[place] = np.exp(logprob)
    expected, counts = exact * SEEDS, np.bincount(texts, minlength=VOCAB**TOKENS)
    rare = expected < 5
    found = float(((counts - expected) ** 2 / expected)[~rare].sum())
    return found + float((counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum())


def drawn(p: list[np.ndarray], q: list[np.ndarray], rule: str) -> tuple[np.ndarray, float]:
    """Texts of all seeds, and the share of drafted tokens that were accepted."""
    texts, accepted = np.zeros(SEEDS, np.int64), 0
    chance = np.random.default_rng(1)
    every = np.arange(SEEDS)
    for i in range(TOKENS):
        g, log_p, log_q = gumbel(i), p[i][texts], q[i][texts]
        draft, target = np.argmax(log_q + g, axis=1), np.argmax(log_p + g, axis=1)
        if rule == "equal":
            chosen, right = target, draft == target
        else:
            ratio = np.exp(log_p[every, draft] - log_q[every, draft])
            right = chance.random(SEEDS) < ratio
            rest = np.log(np.maximum(np.exp(log_p) - np.exp(log_q), 1e-30))
            chosen = np.where(right, draft, np.argmax(rest + g, axis=1))
        accepted += int(right.sum())
        texts = texts * VOCAB + chosen
    return texts, accepted / (TOKENS * SEEDS)


def test_the_distribution_is_the_models() -> None:
    p, q = tables(1), tables(2)
    texts, accepted = drawn(p, q, "equal")
    assert chi_square(texts, p) < MOST
    assert 0.1 < accepted < 0.9


def test_the_usual_rule_fails_with_shared_noise() -> None:
    """Its draft has to be drawn apart from what is drawn after a rejection."""
    p, q = tables(1), tables(2)
    texts, _ = drawn(p, q, "ratio")
    assert chi_square(texts, p) > 2 * MOST


@pytest.mark.parametrize("seed", range(4))
def test_how_often_a_draft_is_right(seed: int) -> None:
    """P(match) = sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    (log_p, *_), (log_q, *_) = tables(seed), tables(seed + 100)
    g = gumbel(0)
    found = np.mean(np.argmax(log_p + g, axis=1) == np.argmax(log_q + g, axis=1))
    p, q = np.exp(log_p[0]), np.exp(log_q[0])
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
    expected = float((1 / ratios.sum(axis=1)).sum())
    assert found == pytest.approx(expected, abs=5 * np.sqrt(0.25 / SEEDS))
    distance = float(np.abs(p - q).sum() / 2)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
