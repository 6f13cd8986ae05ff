"""Each sampler against its definition in float64, as rows of one batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.sampling.contrastive_score import candidates, contrastive_choice
from jinfer.sampling.samplers import PAPERS_FSD
from jinfer.sampling.sampling_metadata import allowed_mask
from jinfer.sampling.sampling_params import SamplingParams
from tests.arrays import on_device
from tests.reference import numpy_samplers as numpy
from tests.reference.numpy_sampling import Floats, probabilities
from tests.sampling.batches import (
    VOCAB,
    Batch,
    batch,
    call,
    draw,
    left,
    padded,
    params,
    random_logits,
)

pytestmark = pytest.mark.usefixtures("both_ways")

LONG = 2500  # tokens, more than two blocks of a history
KINDS = ("plain", "ties", "forbidden", "peaked", "flat", "one")


def logits_of(kind: str, seed: int) -> Floats:
    x = random_logits(seed)[0]
    rng = np.random.default_rng(seed)
    if kind == "ties":
        return np.round(x)
    if kind == "forbidden":
        x[rng.permutation(VOCAB)[: VOCAB // 2]] = -np.inf
    elif kind == "peaked":
        x[rng.integers(VOCAB)] = 30.0
    elif kind == "flat":
        x[:] = -2.5
    elif kind == "one":
        x[np.arange(VOCAB) != rng.integers(VOCAB)] = -np.inf
    return x


def assert_sampler(
    rows: Sequence[tuple[Mapping[str, Any], Callable[[Floats], Floats]]], x: Floats
) -> None:
    """Every row's result on the same logits is its definition's."""
    got = left(np.tile(x, (len(rows), 1)), batch(*(params(**fields) for fields, _ in rows)))
    for (fields, definition), row in zip(rows, got, strict=True):
        expected = definition(x)
        assert np.array_equal(row > -np.inf, expected > -np.inf), fields
        assert_allclose(row, expected, rtol=2e-5, atol=2e-5, err_msg=str(fields))


def only(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "samplers": [name], name: value, **more}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "definition", "values"),
    [
        ("top_k", numpy.top_k, (1, 3, 50, VOCAB, 1000)),
        ("top_p", numpy.top_p, (1e-6, 0.3, 0.7, 0.95, 0.9999)),
        ("min_p", numpy.min_p, (1e-6, 0.02, 0.3, 1.0)),
        ("typical_p", numpy.typical_p, (1e-6, 0.2, 0.6, 0.95)),
        ("tfs_z", numpy.tfs_z, (1e-6, 0.3, 0.9, 0.99)),
        ("top_a", numpy.top_a, (0.01, 0.2, 1.0)),
        ("top_n_sigma", numpy.top_n_sigma, (0.1, 1.0, 2.5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_filters(
    name: str, definition: Callable[..., Floats], values: tuple[float, ...], kind: str, seed: int
) -> None:
    rows = [(only(name, v), lambda x, v=v: definition(x, v)) for v in values]
    assert_sampler(rows, logits_of(kind, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_share_keeps_the_likeliest(kind: str) -> None:
    filters = {"top_p": numpy.top_p, "typical_p": numpy.typical_p, "tfs_z": numpy.tfs_z}
    rows = [(only(n, 0), lambda x, f=f: f(x, 1e-30)) for n, f in filters.items()]
    assert_sampler(rows, logits_of(kind, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_temperature(kind: str) -> None:
    names = ("temperature", "dynatemp_range", "dynatemp_exponent")
    settings: list[tuple[float, ...]] = [(t,) for t in (0.01, 0.7, 1.0, 5.0)]
    settings += [(1.0, 0.5, 1.0), (0.7, 0.5, 2.0), (1.5, 0.2, 0.5)]

    def scaled(x: Floats, *, by: tuple[float, ...]) -> Floats:
        return numpy.temperature(x, *by)

    rows = [(dict(zip(names, by, strict=False)), partial(scaled, by=by)) for by in settings]
    assert_sampler(rows, logits_of(kind, 3))


def test_zero_dynamic_temperature_is_greedy() -> None:
    """Without entropy the temperature is 0 where the range reaches so far."""
    x = logits_of("peaked", 1) * 10
    cold = batch(*(params(seed=i, temperature=0.5, dynatemp_range=0.5) for i in range(16)))
    assert set(draw(np.tile(x, (16, 1)), cold)[0]) == {x.argmax()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.6])
def test_xtc(kind: str, threshold: float) -> None:
    x = logits_of(kind, 5)
    fields = {"temperature": 1.0, "samplers": ["xtc"], "xtc_threshold": threshold}
    always = fields | {"xtc_probability": 1.0}
    assert_sampler([(always, lambda x: numpy.xtc(x, threshold))], x)


def test_xtc_has_the_requested_probability() -> None:
    x, count = np.log([0.5, 0.3, 0.2]), 4000
    row = batch(params(seed=3, xtc_probability=0.3, temperature=1.0))
    many = row.repeated(count)
    drawn = jnp.arange(count, dtype=jnp.int32)
    got = left(np.tile(x, (count, 1)), many.with_progress(many.progress._replace(drawn=drawn)))
    happened = (got == -np.inf).sum(axis=-1)
    assert set(happened) == {0, 2}  # all but the least of three
    assert abs((happened == 2).mean() - 0.3) < 0.03


# Mirostat.


def at_mu(rows: Batch, mu: float) -> Batch:
    return rows.with_progress(rows.progress._replace(mu=jnp.full_like(rows.progress.mu, mu)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mu", [0.1, 2.0, 5.0, 10.0])
def test_mirostat(kind: str, mu: float) -> None:
    x = logits_of(kind, 6)
    rows = batch(params(mirostat=1), params(mirostat=2))
    first, second = left(np.tile(x, (2, 1)), at_mu(rows, mu))
    assert_allclose(second, numpy.mirostat_2(x, mu), atol=2e-5)
    if kind not in ("flat", "one"):  # Zipf's law has no slope there
        assert_allclose(first, numpy.mirostat_1(x, mu), atol=2e-5)
    assert np.isfinite(first).any()


def test_mirostat_of_a_flat_distribution() -> None:
    flat, one = (left(logits_of(kind, 6)[None], batch(params(mirostat=1))) for kind in KINDS[-2:])
    assert np.isfinite(flat).all()
    assert np.isfinite(one).sum() == 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_moves_mu(version: int) -> None:
    x = random_logits(7)
    rows = batch(params(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=0.8))
    assert rows.progress.mu.item() == 6.0
    mu = 6.0
    x, rows = padded(x, rows)
    for _ in range(20):
        tokens, progress = call(x, rows)
        mu = numpy.adapted_mu(x[0] / 0.8, int(tokens[0]), mu, 3.0, 0.2)
        assert_allclose(progress.mu[0], mu, rtol=1e-5)
        rows = rows.with_progress(progress)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_the_requested_surprise(version: int) -> None:
    """In 16 answers from a distribution with 6.4 bits of entropy, once mu has settled."""
    rng, tau = np.random.default_rng(8), 4.0
    x = (-0.9 * np.log(np.arange(1.0, VOCAB + 1)))[rng.permutation(VOCAB)]
    made = [params(seed=seed, mirostat=version, mirostat_tau=tau) for seed in range(16)]
    tokens = draw(np.tile(x, (16, 1)), batch(*made), steps=100)
    bits = -numpy.logprobs(x)[tokens] / np.log(2)
    assert abs(np.mean(bits[40:]) - tau) < 0.25


def test_mu_of_rows_without_mirostat_is_unchanged() -> None:
    rows = batch(params(), params(mirostat=2), params(temperature=1.0))
    _, progress = call(*padded(random_logits(9, 3), rows))
    assert (np.asarray(progress.mu)[:3] == 10.0).tolist() == [True, False, True]


# What depends on the tokens so far.


def text_of(kind: str, length: int = 40) -> list[int]:
    rng = np.random.default_rng(length)
    if kind == "repeating":
        return ([3, 4, 5, 6, 7, 8] * length)[:length]
    if kind == "one":
        return [9] * length
    return rng.integers(0, 6 if kind == "few" else VOCAB, length).tolist()


TEXTS = ("few", "many", "repeating", "one")


def with_text(text: list[int], *rows: dict[str, Any], prompt: int = 0, length: int = 48) -> Batch:
    made = [params(**fields) for fields in rows]
    count = len(made)
    return batch(*made, past=[text] * count, prompts=[prompt] * count, length=length)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("prompt", [0, 15, 40])
@pytest.mark.parametrize("last_n", [-1, 1, 30, 100])
def test_penalties(kind: str, prompt: int, last_n: int) -> None:
    x, text = logits_of("forbidden", 10), text_of(kind)
    cases = [(1.3, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (1.5, 0.2, 0.1)]
    rows = [
        {"repetition_penalty": r, "presence_penalty": p, "frequency_penalty": f}
        | {"penalty_last_n": last_n}
        for r, p, f in cases
    ]
    got = left(np.tile(x, (len(rows), 1)), with_text(text, *rows, prompt=prompt))
    for row, case in zip(got, cases, strict=True):
        assert_allclose(row, numpy.penalties(x, text, prompt, *case, last_n), atol=1e-5)


@pytest.mark.parametrize("length", [1023, 1024, 1025, LONG])
def test_penalties_of_long_texts(length: int) -> None:
    """A history is read in blocks, of which the last may reach beyond its end."""
    x, text = logits_of("plain", 11), text_of("many", length)
    fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.01}
    got = left(x[None], with_text(text, fields, prompt=500, length=LONG))
    assert_allclose(got[0], numpy.penalties(x, text, 500, 1.2, 0.0, 0.01), atol=1e-4)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("length", [0, 1, 2, 40])
@pytest.mark.parametrize("last_n", [-1, 7, 100])
@pytest.mark.parametrize("breakers", [(), (4,), (9, 3)])
def test_dry(kind: str, length: int, last_n: int, breakers: tuple[int, ...]) -> None:
    x, text = logits_of("plain", 12), text_of(kind, length)
    cases = [(0.8, 1.75, 2), (2.0, 1.1, 1), (0.5, 1.2, 4)]
    rows = [
        {"dry_multiplier": m, "dry_base": b, "dry_allowed_length": a}
        | {"dry_penalty_last_n": last_n, "dry_sequence_breakers": breakers}
        for m, b, a in cases
    ]
    got = left(np.tile(x, (len(rows), 1)), with_text(text, *rows))
    for row, case in zip(got, cases, strict=True):
        assert_allclose(row, numpy.dry(x, text, *case, last_n, breakers), rtol=1e-4, atol=1e-4)


def test_dry_of_long_texts() -> None:
    x, text = logits_of("plain", 13), (text_of("many", 1100) * 2)[:2000]
    rows = {"dry_multiplier": 1.0, "dry_base": 1.01, "dry_sequence_breakers": [text[-100]]}
    got = left(x[None], with_text(text, rows, length=LONG))
    expected = numpy.dry(x, text, 1.0, 1.01, breakers=[text[-100]])
    assert (expected < x - 2).any()
    assert_allclose(got[0], expected, atol=1e-4)


def test_a_very_long_repetition_counts_as_128_tokens_and_stays_finite() -> None:
    x, text = logits_of("plain", 14), [9] * 300
    rows = [{"dry_multiplier": 1.0, "dry_base": base} for base in (1.02, 100.0)]
    got = left(np.tile(x, (2, 1)), with_text(text, *rows, length=LONG))
    assert_allclose(x[9] - got[0, 9], 1.02**126, rtol=1e-4)
    assert -np.inf < got[1, 9] < -1e29


def test_logit_bias_and_bans() -> None:
    x = logits_of("plain", 15)
    rows = batch(
        params(logit_bias={3: 2.5, VOCAB - 1: -100, 8: -np.inf}), params(banned_token_ids=[3, 4])
    )
    first, second = left(np.tile(x, (2, 1)), rows)
    expected = x.copy()
    expected[[3, VOCAB - 1, 8]] += [2.5, -100, -np.inf]
    assert_allclose(first, expected, rtol=1e-6)
    assert np.flatnonzero(second == -np.inf).tolist() == [3, 4]


@pytest.mark.parametrize("text", [[], [5], [1, 2], [2, 1, 2], [7, 1, 2, 3], [3, 3, 3]])
def test_bad_words(text: list[int]) -> None:
    x, words = logits_of("plain", 16), [[9], [2, 11], [1, 2, 12], [1, 2, 3, 13], [3, 3, 3, 3]]
    got = left(x[None], with_text(text, {"bad_words_ids": words}))
    assert_allclose(got[0], numpy.bad_words(x, text, words), rtol=1e-6)


def test_masks() -> None:
    """Rows with a grammar obey the mask of their slot."""
    x = random_logits(17, 3)
    rows = batch(params(temperature=1.0), params(), params())
    mask = np.zeros((3, -(-VOCAB // 32)), np.uint32)
    for slot, allowed in enumerate([[4], [VOCAB - 1, 31], [32, 64]]):
        words = allowed_mask(params(allowed_token_ids=allowed), VOCAB)
        assert words is not None
        mask[slot] = words
    rows = rows._replace(slots=on_device([2, 1, 0], jnp.int32))
    masked = np.array([True, False, True])
    got, _ = call(x, rows, mask=mask, masked=masked)
    tokens = np.asarray(got).tolist()
    assert tokens == [32 if x[0, 32] >= x[0, 64] else 64, x[1].argmax(), 4]


# FSD and contrastive search.

FSD: list[dict[str, Any]] = [
    {},
    {"fsd_k": 3, "fsd_alpha": 0.65, "fsd_pool": 0},
    {"fsd_n": 1},
    {"fsd_n": 2, "fsd_beta": 0.5, "fsd_alpha": 0.9},
    {"fsd_n": 8, "fsd_k": 64, "fsd_alpha": 0.8, "fsd_pool": 64},
    {"fsd_k": 10, "fsd_pool": 4, "fsd_alpha": 0.3},
    {"fsd_alpha": 0.0},
    {"fsd_alpha": 1.0},
]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_fsd(kind: str, length: int, seed: int) -> None:
    """Texts of the likeliest tokens, so that penalties matter."""
    x = random_logits(20 + seed)[0] / 2
    likeliest = np.argsort(-x)
    text = likeliest[np.array(text_of(kind, length), int) % 12].tolist()
    rows = with_text(text, *({"strategy": "fsd"} | fields for fields in FSD))
    chosen = draw(np.tile(x, (len(FSD), 1)), rows)[0]
    for token, fields in zip(chosen.tolist(), FSD, strict=True):
        names = {name.removeprefix("fsd_"): value for name, value in fields.items()}
        assert token == numpy.fsd(x, text, **names), fields


def test_fsd_of_long_texts() -> None:
    x = random_logits(24)[0] / 2
    text = np.argsort(-x)[np.random.default_rng(4).integers(0, 3, 2400)].tolist()
    rows = with_text(text, {"strategy": "fsd"}, {"strategy": "fsd", **PAPERS_FSD}, length=LONG)
    names = {name.removeprefix("fsd_"): value for name, value in PAPERS_FSD.items()}
    expected = [numpy.fsd(x, text), numpy.fsd(x, text, **names)]
    assert draw(np.tile(x, (2, 1)), rows)[0].tolist() == expected


def test_fsd_weighs_probabilities_at_its_temperature() -> None:
    x = random_logits(25)[0]
    text = [int(x.argmax())] * 10
    cold, hot = ({"strategy": "fsd", "temperature": t} for t in (0.01, 3.0))
    chosen = draw(np.tile(x, (2, 1)), with_text(text, cold, hot))[0]
    assert chosen.tolist() == [numpy.fsd(x / 0.01, text), numpy.fsd(x / 3.0, text)]
    assert chosen[0] != chosen[1]


def test_random_fsd() -> None:
    """By chance one or the other, and FSD alone after its first tokens."""
    x = random_logits(26)[0] / 3
    text = np.argsort(-x)[[0, 1, 2, 0, 1, 2, 0, 1]].tolist()
    row = with_text(text, {"strategy": "random_fsd", "seed": 5})
    count = 2000
    many = row.repeated(count)
    chosen = numpy.fsd(x, text)
    kept = np.flatnonzero(np.isfinite(numpy.top_p(numpy.top_k(x, 8), 0.93)))

    def shares(tokens: int) -> Floats:
        keys = jnp.arange(2 * count, dtype=jnp.uint32).reshape(count, 2)
        sampler = many.sampler._replace(key=keys)
        drawn = jnp.full(count, tokens, jnp.int32)
        rows = many._replace(sampler=sampler, progress=many.progress._replace(drawn=drawn))
        return np.bincount(draw(np.tile(x, (count, 1)), rows)[0], minlength=VOCAB) / count

    expected = 0.5 * probabilities(np.where(np.isin(np.arange(VOCAB), kept), x, -np.inf))
    expected[chosen] += 0.5
    assert np.abs(shares(9) - expected).max() < 0.05
    assert shares(10)[chosen] == 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_contrastive(alpha: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = random_logits(seed)
    ids, p = candidates(on_device(x, jnp.float32), 5)
    likeliest = np.argsort(-x[0])[:5]
    assert np.array_equal(ids[0], likeliest)
    assert_allclose(p[0], probabilities(x[0])[likeliest], rtol=1e-5)
    hidden, past = rng.normal(size=(5, 16)), rng.normal(size=(9, 16))
    past[7:] = hidden[0]  # beyond the sequence: not to be looked at
    narrow, seen = (on_device(part, jnp.float32) for part in (hidden, past))
    chosen = contrastive_choice(p[0], narrow, seen, jnp.int32(7), jnp.float32(alpha))
    assert chosen.item() == numpy.contrastive(np.asarray(p[0], float), hidden, past[:7], alpha)


def test_contrastive_never_chooses_missing_candidates() -> None:
    p, hidden = on_device([0.0, 0.1, 0.0]), jnp.eye(3)
    past = on_device([[0.0, 1.0, 0.0]])
    assert contrastive_choice(p, hidden, past, jnp.int32(1), jnp.float32(1.0)).item() == 1
    assert contrastive_choice(p, hidden, past, jnp.int32(0), jnp.float32(0.5)).item() == 1


# Orders.


def test_samplers_run_in_the_requests_order() -> None:
    """Two orders of the same samplers, and the default one, in one batch."""
    x, text = logits_of("plain", 30), text_of("few")
    fields: dict[str, Any] = {"temperature": 2.0, "top_p": 0.8, "min_p": 0.05, "seed": 0}
    fields |= {"repetition_penalty": 1.5}

    def penalized(x: Floats) -> Floats:
        return numpy.penalties(x, text, 0, 1.5)

    def hot(x: Floats) -> Floats:
        return numpy.temperature(x, 2.0)

    orders: list[tuple[list[str] | None, Callable[[Floats], Floats]]] = [
        (None, lambda x: numpy.min_p(numpy.top_p(hot(penalized(x)), 0.8), 0.05)),
        (
            ["min_p", "top_p", "temperature", "penalties"],
            lambda x: penalized(hot(numpy.top_p(numpy.min_p(x, 0.05), 0.8))),
        ),
        (
            ["temperature", "penalties", "min_p"],
            lambda x: numpy.min_p(penalized(hot(x)), 0.05),
        ),
        (["top_p"], lambda x: numpy.top_p(x, 0.8)),
    ]
    made = [SamplingParams(samplers=names, **fields) for names, _ in orders]
    got = left(np.tile(x, (4, 1)), batch(*made, past=[text] * 4, prompts=[0] * 4))
    for row, (names, definition) in zip(got, orders, strict=True):
        assert_allclose(row, definition(x), atol=2e-5, err_msg=str(names))
    assert len({tuple(np.isfinite(row)) for row in got}) > 1
