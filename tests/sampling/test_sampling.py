"""Sampling: the rules of its parameters, and its programs against NumPy's definitions."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.sampling.forbidden_tokens import ForbiddenTokens, token_ids
from jinfer.sampling.logprobs import log_probabilities
from jinfer.sampling.param_types import MAX_END_IDS, MAX_LOGPROBS, MAX_STOP_IDS
from jinfer.sampling.sampling_metadata import allowed_mask, mask_words, metadata_row
from jinfer.sampling.sampling_params import SamplingParams
from tests.arrays import on_device
from tests.reference.numpy_sampling import Floats, probabilities
from tests.sampling.batches import (
    SAMPLE,
    VOCAB,
    Jitted,
    batch,
    draw,
    left,
    padded,
    params,
    random_logits,
)

pytestmark = pytest.mark.usefixtures("both_ways")

# Filters.


def kept_by_sorting(scaled: Floats, p: SamplingParams) -> np.ndarray:
    """Which tokens stay, by the textbook: sort, cut; whatever equals the last one kept stays too.

    The reference's own filters choose among equals by id; the engine's keep them all.
    """
    left = probabilities(scaled)
    if p.top_k:
        left = np.where(left >= np.sort(left)[::-1][min(p.top_k, len(left)) - 1], left, 0)
    if p.top_p < 1:
        likely_first = np.sort(left / left.sum())[::-1]
        count = 1 + np.count_nonzero(np.cumsum(likely_first)[:-1] < p.top_p)
        left = np.where(left >= np.sort(left)[::-1][count - 1], left, 0)
    return (left > 0) & (left >= p.min_p * left.max())


FILTERS = [
    params(),
    params(top_k=1),
    params(top_k=7),
    params(top_k=VOCAB + 5),
    params(top_p=1e-3),
    params(top_p=0.37),
    params(top_p=0.9),
    params(top_p=0.9999),
    params(min_p=0.02),
    params(min_p=0.5),
    params(min_p=1.0),
    params(top_k=20, top_p=0.81),
    params(top_k=20, top_p=0.95, min_p=0.04),
    params(top_p=0.5, min_p=0.3),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["plain", "ties", "forbidden", "flat"])
def test_filters_equal_sorting(kind: str, seed: int) -> None:
    """All filters as rows of one batch, on the same logits."""
    logits = random_logits(seed)[0]
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "forbidden":
        logits[np.random.default_rng(seed).permutation(VOCAB)[: VOCAB // 2]] = -np.inf
    elif kind == "flat":
        logits[:] = -2.5
    rows = np.tile(logits, (len(FILTERS), 1))
    got = left(rows, batch(*FILTERS))
    for row, p in zip(got, FILTERS, strict=True):
        kept = kept_by_sorting(logits, p)
        assert np.array_equal(row > -np.inf, kept), p
        largest = logits.max() if p.draws else 0.0  # the temperature's sampler takes it away
        assert_allclose(row[kept], logits[kept] - largest, atol=1e-6)


def wide(logits: Floats) -> Floats:
    """A row of these, and of what cannot be: so that one program serves all tests."""
    return np.array([[*logits, *[-np.inf] * (VOCAB - len(logits))]])


def test_filters_apply_in_sequence() -> None:
    """top_p counts the mass of the two that top_k left, in which the first alone has 0.6."""
    logits = wide(np.log([0.3, 0.2, 0.17, 0.17, 0.16]))
    both = left(logits, batch(params(top_k=2, top_p=0.55)))
    assert np.flatnonzero(both[0] > -np.inf).tolist() == [0]
    alone = left(logits, batch(params(top_p=0.45)))
    assert np.flatnonzero(alone[0] > -np.inf).tolist() == [0, 1]


def test_zero_and_minus_zero_are_equal() -> None:
    kept = left(wide(np.array([-1.0, 0.0, -0.0, -2.0])), batch(params(top_k=1)))
    assert np.flatnonzero(kept[0] > -np.inf).tolist() == [1, 2]


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"top_k": 3, "min_p": 1.0}])
def test_a_vocabulary_of_one(fields: dict[str, Any]) -> None:
    assert draw(np.array([[-3.0]]), batch(params(**fields))).item() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-3},
        {"temperature": 1e-30},
        {"temperature": 2e-38},  # quotients are beyond float32
        {"temperature": 1e-45},  # the temperature itself is nearly 0
        {"top_p": 1e-6},
        {"top_p": 1e-42},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 1_000_000, "top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
def test_extreme_parameters_choose_the_likeliest_token(
    fields: dict[str, Any], scale: float
) -> None:
    logits = scale * random_logits(5, 8)
    rows = [params(seed=i, **fields) for i in range(8)]
    assert np.array_equal(draw(logits, batch(*rows))[0], logits.argmax(axis=-1))


def test_high_temperature_draws_any_allowed_token() -> None:
    logits = random_logits(6)
    logits[:, ::2] = -np.inf
    rows = batch(*(params(seed=i, temperature=1_000_000) for i in range(16)))
    drawn = draw(np.tile(logits, (16, 1)), rows, steps=38)
    assert set(drawn.ravel()) <= set(range(1, VOCAB, 2))
    assert len(set(drawn.ravel())) > 90


# Batches and seeds.


MIXED = [
    params(),
    params(seed=1, temperature=0.8),
    params(seed=2, top_k=5),
    params(strategy="greedy", temperature=2.0),
    params(seed=3, top_p=0.6, temperature=1.5),
    params(seed=4, min_p=0.1),
]


def test_greedy_and_drawing_rows_in_one_batch() -> None:
    logits = random_logits(7, len(MIXED))
    drawn = draw(logits, batch(*MIXED), steps=40)
    for row, p in enumerate(MIXED):
        tokens = set(drawn[:, row].tolist())
        if p.drawing_temperature == 0:
            assert tokens == {logits[row].argmax()}
        else:
            scaled = logits[row] / p.drawing_temperature
            assert tokens <= set(np.flatnonzero(kept_by_sorting(scaled, p)))
            assert len(tokens) > 1


def test_equal_likeliest_tokens_are_the_first_when_greedy() -> None:
    assert draw(wide(np.array([1.0, 5.0, 5.0, 5.0])), batch(params())).item() == 1


def test_row_is_independent_of_other_rows() -> None:
    """Alone, among others, and at another place, the same tokens come."""
    logits = random_logits(8, len(MIXED))
    together = draw(logits, batch(*MIXED), steps=12)
    order = [3, 5, 4, 1, 0, 2]
    shuffled = draw(logits[order], batch(*(MIXED[i] for i in order)), steps=12)
    assert np.array_equal(shuffled, together[:, order])
    for row, p in enumerate(MIXED):
        alone = draw(logits[row : row + 1], batch(p), steps=12)
        assert np.array_equal(alone[:, 0], together[:, row])


def test_seeds() -> None:
    """Both halves of a 64-bit seed count; without one, every request draws anew."""
    logits = np.zeros((1, VOCAB))
    seeds = [0, 1, 2**32, 2**63, None, None]
    runs = [tuple(draw(logits, batch(params(seed=s, top_k=VOCAB)), 12).ravel()) for s in seeds]
    again = [tuple(draw(logits, batch(params(seed=s, top_k=VOCAB)), 12).ravel()) for s in seeds]
    assert runs[:4] == again[:4]
    assert len({*runs, *again}) == 8
    assert all(len(set(run)) > 6 for run in runs)  # no step repeats the one before


@pytest.mark.parametrize(
    "p",
    [
        params(seed=11, temperature=1.0),
        params(seed=12, temperature=0.6),
        params(seed=13, temperature=1.3, top_k=6),
        params(seed=14, top_p=0.8),
        params(seed=15, temperature=2.0, top_k=9, top_p=0.9, min_p=0.1),
    ],
    ids=range(5),
)
def test_frequencies(p: SamplingParams) -> None:
    """20,000 draws of one request, against the distribution that the filters leave.

    The bound on chi-square is passed by chance once in ten thousand; the seeds are fixed.
    """
    count = 20_000
    logits = np.random.default_rng(9).normal(0, 1.2, 12)
    many = batch(p, vocab=12).repeated(count)
    drawn = jnp.arange(count, dtype=jnp.int32)
    many = many.with_progress(many.progress._replace(drawn=drawn))
    tokens = draw(np.tile(logits, (count, 1)), many)[0]
    observed = np.bincount(tokens, minlength=12)
    scaled = logits / p.drawing_temperature
    target = np.where(kept_by_sorting(scaled, p), probabilities(scaled), 0)
    target *= count / target.sum()
    assert not observed[target == 0].any()
    possible = target > 0
    chi_square = np.sum((observed - target)[possible] ** 2 / target[possible])
    freedom = np.count_nonzero(possible) - 1
    deviation = 2 / (9 * freedom)  # Wilson and Hilferty, 1931
    bound = freedom * (1 - deviation + 3.72 * deviation**0.5) ** 3
    assert chi_square < bound


# The end, log-probabilities, the program.


def test_no_end_before_min_tokens() -> None:
    """Ends are likeliest here: they come as soon as they may, greedy or drawn."""
    logits = np.full((3, VOCAB), -4.0)
    logits[:, [7, 50, 120]] = 20.0
    rows = [
        params(min_tokens=3, stop_token_ids=(50,)),
        params(min_tokens=3, stop_token_ids=(50,), temperature=1.0),
        params(min_tokens=0, temperature=1.0),
    ]
    drawn = draw(logits, batch(*rows, end_ids=(7, 120)), steps=5)
    ends = np.isin(drawn, [7, 50, 120])
    assert ends.T.astype(int).tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]


def test_host_and_sampler_forbid_the_same_tokens() -> None:
    """Where a grammar leaves one token, which is not sampled."""
    rng = np.random.default_rng(3)
    text, drawn = [*rng.integers(0, 8, 12).tolist()], 4
    for one in (
        params(banned_token_ids=(1, 40), logit_bias={2: float("-inf"), 3: -100.0, 199: 5.0}),
        params(bad_words_ids=((6,), (*text[-2:], 7), (*text[-3:-1], 9), (*text, 8))),
        params(min_tokens=4, stop_token_ids=(50,)),
        params(min_tokens=5, stop_token_ids=(50,), allowed_token_ids=range(100)),
        params(),
    ):
        row = metadata_row(one, (7, 120), VOCAB)
        rules = ForbiddenTokens.of(one, row, allowed_mask(one, VOCAB), (11,))
        mask = np.full(mask_words(VOCAB), 0xFFFFFFFF, np.uint32)
        rules.clear(mask, text, drawn)
        some = batch(one, end_ids=(7, 120), past=[text], prompts=[len(text) - drawn])
        progress = some.progress._replace(drawn=on_device(np.array([drawn], np.int32)))
        expected = left(np.zeros((1, VOCAB)), some.with_progress(progress))[0] > -np.inf
        allowed = one.allowed_token_ids
        expected[11] = False
        expected &= np.isin(range(VOCAB), range(VOCAB) if allowed is None else allowed)
        ids = np.flatnonzero(expected).tolist()
        assert [id for id in token_ids(mask) if id < VOCAB] == ids
        assert [id for id in range(VOCAB) if not rules.forbids(id, text, drawn)] == ids


def test_every_end_token_is_forbidden() -> None:
    stops, ends = range(MAX_STOP_IDS), range(100, 100 + MAX_END_IDS - MAX_STOP_IDS)
    logits = np.zeros((1, VOCAB))
    logits[:, [*stops, *ends]] = 5.0
    row = batch(params(min_tokens=1, stop_token_ids=stops), end_ids=ends)
    assert draw(logits, row).item() == MAX_STOP_IDS
    with pytest.raises(ValueError, match=f"^{MAX_END_IDS + 1} ids end a sequence; at most"):
        batch(params(), end_ids=range(MAX_END_IDS + 1))


def test_ids_that_the_vocabulary_lacks_forbid_nothing() -> None:
    row = batch(params(min_tokens=5, stop_token_ids=(2**31 - 1, VOCAB)))
    logits = np.zeros((1, VOCAB))
    logits[:, -1] = 1.0
    assert draw(logits, row).item() == VOCAB - 1


LOGPROBS = Jitted(log_probabilities)


@pytest.mark.parametrize("vocab", [8, VOCAB])
def test_logprobs(vocab: int) -> None:
    """Of the model's own distribution, whoever draws; the likeliest first, of equal ones too."""
    logits = random_logits(10, 5)[:, :vocab]
    logits[1, ::2] = -np.inf
    logits[2] = np.round(logits[2])
    tokens = np.array([3, 0, 7, 1, 5])
    own, ids, top = LOGPROBS(on_device(logits, jnp.float32), on_device(tokens, jnp.int32))
    with np.errstate(divide="ignore"):
        target = np.log([probabilities(row) for row in logits])
    assert_allclose(own, target[np.arange(5), tokens], atol=2e-6)
    count = min(MAX_LOGPROBS, vocab)
    likeliest = np.argsort(-target, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(ids, likeliest)
    assert_allclose(top, np.take_along_axis(target, likeliest, -1), atol=2e-6)


def test_logprobs_of_requested_rows() -> None:
    logits = on_device(random_logits(11, 3), jnp.float32)
    tokens, target = on_device([1, 2, 3], jnp.int32), on_device([False, True, False])
    every, some = LOGPROBS(logits, tokens), LOGPROBS(logits, tokens, target)
    for whole, part in zip(every, some, strict=True):
        assert np.array_equal(whole[1], part[1])
    none = LOGPROBS(logits, tokens, ~target & False)
    assert not any(np.any(part) for part in none)


def test_bfloat16_logits_are_chosen_from_in_float32() -> None:
    """Noise added to rounded numbers, and sums of them, would be rounded too."""
    logits, rows = padded(random_logits(12, len(MIXED)), batch(*MIXED))
    rounded = on_device(logits, jnp.bfloat16)
    wide = SAMPLE(rounded.astype(jnp.float32), *rows)
    narrow = SAMPLE(rounded, *rows)
    assert jax.tree.all(jax.tree.map(np.array_equal, narrow, wide))


def sorts(lowered: jax.stages.Lowered) -> int:
    """How many sorts the compiled program has."""
    return len(re.findall(r"\bsort\(", lowered.compile().as_text() or ""))


def test_only_tail_free_sampling_sorts(both_ways: str) -> None:
    """A sort takes as long as a small model's whole step, at a real vocabulary's size."""
    logits = jax.ShapeDtypeStruct((2, 49152), jnp.float32)
    lowered = SAMPLE.program.lower(logits, *batch(params(), params()))
    assert sorts(lowered) == (both_ways == "xla")
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert sorts(LOGPROBS.program.lower(logits, tokens)) == 0


def test_sort_detector_finds_a_sort() -> None:
    assert sorts(jax.jit(jnp.sort).lower(jnp.zeros(1000))) == 1
