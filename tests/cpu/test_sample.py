"""The sampler's custom call: what it refuses, numbers that are none, noise; see tests/sampling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.cpu import build_library, sample
from jinfer.cpu.isa import Isa
from jinfer.sampling.logprobs import log_probabilities_reference
from jinfer.sampling.rng import noise
from jinfer.sampling.samplers import NOT_FINITE
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.sampling.batches import Batch, batch, params

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

VOCAB = 300
ROWS = batch(params(temperature=0.8, top_k=5), params(), vocab=VOCAB)
LOGITS = on_device(np.random.default_rng(0).normal(0, 3, (2, VOCAB)), jnp.float32)


def chosen(logits: Any, rows: Batch, masks: Any = (), left: bool = False) -> list[np.ndarray]:
    """Tokens, mu, and what is left."""
    sequences = (rows.history, rows.lengths, rows.prompts, rows.slots, rows.slots)
    parameters = (*rows.sampler, *rows.progress)
    made = sample.sample(logits, parameters, *sequences, masks, filtered=left)
    return [np.asarray(part) for part in made]


def in_sampler(**parts: Any) -> Batch:
    return ROWS._replace(sampler=ROWS.sampler._replace(**parts))


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (in_sampler(numbers=jnp.zeros((2, 20))), "parameters"),
        (in_sampler(counts=jnp.zeros((2, 13), jnp.int32)), "parameters"),
        (in_sampler(chain=jnp.zeros((2, 14), jnp.int32)), "parameters"),
        (in_sampler(key=jnp.zeros((1, 2), jnp.uint32)), "parameters"),
        (in_sampler(end_ids=jnp.zeros((1, 4), jnp.int32)), "lists"),
        (in_sampler(biases=jnp.zeros((2, 3))), "lists"),
        (in_sampler(bad_words=jnp.zeros((2, 4, 0), jnp.int32)), "lists"),
        (ROWS._replace(lengths=jnp.zeros(1, jnp.int32)), "progress"),
        (ROWS._replace(lengths=on_device([0, 49], jnp.int32)), "longer than its history"),
        (ROWS._replace(lengths=on_device([0, -1], jnp.int32)), "longer than its history"),
        (ROWS._replace(slots=on_device([0, 2], jnp.int32)), "not there"),
        (ROWS._replace(slots=on_device([-1, 0], jnp.int32)), "not there"),
        (ROWS._replace(slots=on_device([0], jnp.int32)), "not a request for each row"),
    ],
)
def test_mismatched_operands_are_errors(rows: Batch, what: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jinfer_sample: .*{what}"):
        chosen(LOGITS, rows)


@pytest.mark.parametrize("words", [9, 11])
def test_mismatched_masks_are_errors(words: int) -> None:
    masks = jnp.zeros((2, words), jnp.uint32), jnp.ones(2, jnp.bool_)
    with pytest.raises(jax.errors.JaxRuntimeError, match="masks do not fit"):
        chosen(LOGITS, ROWS, masks)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_nan_logits_give_no_token(odd: float, isa: Isa) -> None:
    logits = LOGITS.at[0, 17].set(odd)
    with build_library.lowered_isa(isa):
        tokens, *_ = chosen(logits, ROWS)
        assert tokens[0] == NOT_FINITE
        assert tokens[1] == chosen(LOGITS, ROWS)[0][1]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("vocab", [1, 7, 40, 2049])
def test_log_probabilities(vocab: int, isa: Isa) -> None:
    logits = np.random.default_rng(vocab).normal(0, 3, (4, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2, 1:] = -np.inf
    x, tokens = on_device(logits), on_device([0, vocab // 2, 0, vocab - 1], jnp.int32)
    with build_library.lowered_isa(isa):
        got = sample.log_probabilities(x, tokens, jnp.ones(4, jnp.bool_), min(20, vocab))
    expected = log_probabilities_reference(x, tokens)
    assert np.array_equal(got[1], expected[1])
    assert_allclose(got[0], expected[0], atol=2e-6)
    assert_allclose(got[2], expected[2], atol=2e-6)


def test_log_probabilities_of_nan() -> None:
    logits = LOGITS.at[0, 5].set(jnp.nan)
    expected = on_device([True, True])
    own, ids, top = sample.log_probabilities(logits, jnp.zeros(2, jnp.int32), expected, 20)
    assert np.isnan(own[0])
    assert np.isnan(top[0]).all()
    assert np.isfinite(own[1])
    assert ids[0].tolist() == list(range(20))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not one of each"):
        jax.block_until_ready(
            sample.log_probabilities(LOGITS, jnp.zeros(3, jnp.int32), expected, 20)
        )


@pytest.mark.parametrize("isa", isas())
def test_first_token_is_chosen_if_none_is_allowed(isa: Isa) -> None:
    masks = jnp.zeros((2, 10), jnp.uint32), on_device([True, True])
    with build_library.lowered_isa(isa):
        assert chosen(LOGITS, ROWS, masks)[0].tolist() == [0, 0]
        assert chosen(jnp.full_like(LOGITS, -jnp.inf), ROWS)[0].tolist() == [0, 0]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("seed", [0, 2**63 + 11])
def test_seed_determines_the_noise(seed: int, isa: Isa) -> None:
    """With equal logits the token is where the noise is greatest, for a thousand places."""
    vocab = 77
    rows = batch(params(seed=seed, temperature=1.0), vocab=vocab).repeated(1000)
    drawn = jnp.arange(1000, dtype=jnp.int32)
    rows = rows.with_progress(rows.progress._replace(drawn=drawn))
    with build_library.lowered_isa(isa):
        tokens, *_ = chosen(jnp.zeros((1000, vocab)), rows)
    assert np.array_equal(tokens, jnp.argmax(noise(rows.sampler.key, drawn, vocab), axis=-1))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("vocab", [1, 2, 3, 15, 16, 17, 63, 65, 130, 2047])
def test_any_size(vocab: int, isa: Isa) -> None:
    """Every sampler at once, where vectors are not filled."""
    everything = params(
        temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95, tfs_z=0.99, top_a=0.01,
        top_n_sigma=3.0, repetition_penalty=1.1, xtc_probability=0.5, dynatemp_range=0.5,
    )  # fmt: skip
    made = [everything, params(temperature=1.0), params(mirostat=1), params(strategy="fsd")]
    past = [[i % vocab for i in range(40)]] * len(made)
    rows = batch(*made, past=past, prompts=[9] * len(made), vocab=vocab)
    shape = (len(made), vocab)
    logits = on_device(np.random.default_rng(vocab).normal(0, 3, shape), jnp.float32)
    with build_library.lowered_isa(isa):
        tokens, _, left = chosen(logits, rows, left=True)
    assert all(left[row, token] > -jnp.inf for row, token in enumerate(tokens))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("penalty", [1e-38, 100.0])
@pytest.mark.parametrize("scale", [1.0, 50.0, 1e36])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": VOCAB - 5}, {"top_p": 0.9}, {"typical_p": 0.9}, {"tfs_z": 0.9}, {"min_p": 0.1},
        {"top_n_sigma": 1.0}, {"dynatemp_range": 0.5}, {"mirostat": 1}, {"mirostat": 2},
        {"xtc_probability": 1.0}, {"strategy": "fsd"}, {"top_a": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_overflowing_penalties(
    fields: dict[str, Any], scale: float, penalty: float, isa: Isa
) -> None:
    """A logit that is divided by next to nothing stays a number, and its token the likeliest."""
    row = params(temperature=0.01, repetition_penalty=penalty, **fields)
    seen = list(range(40))
    rows = batch(row, past=[seen], vocab=VOCAB)
    logits = np.random.default_rng(1).normal(0, 1, (1, VOCAB)) * scale
    logits[0, seen] = np.abs(logits[0, seen]) + 60
    with build_library.lowered_isa(isa):
        tokens, mu, left = chosen(on_device(logits, jnp.float32), rows, left=True)
    assert left[0, tokens[0]] > -np.inf
    assert np.isfinite(mu).all()
    assert not np.isnan(left).any()
    assert (tokens[0] in seen) == (penalty < 1)


def test_greedy_row_is_batch_invariant_for_any_logits() -> None:
    logits = LOGITS.at[1, 9].set(jnp.inf)
    alone = batch(params(), vocab=VOCAB)
    assert chosen(logits, ROWS)[0][1] == chosen(logits[1:], alone)[0][0] == NOT_FINITE
