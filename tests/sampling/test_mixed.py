"""All strategies in one batch: each row as alone, to the bit, and one program for all of them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from jinfer.cpu import build_library
from jinfer.cpu.isa import Isa
from jinfer.ops import sampler_calls
from jinfer.ops.backend import target_platform
from jinfer.sampling.sampler import apply_samplers, sample
from jinfer.sampling.sampler_chain import chain
from jinfer.sampling.samplers import COMMON, SELECTABLE
from jinfer.sampling.sampling_metadata import SamplerState, SamplingMetadata
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sampling.token_history import History
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.sampling.batches import FILTER, SAMPLE, Batch, Jitted, batch, params

pytestmark = pytest.mark.usefixtures("both_ways")

ALL: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"top_k": 5, "temperature": 1.2},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"typical_p": 0.8},
    {"tfs_z": 0.9},
    {"top_a": 0.1},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.7, "xtc_threshold": 0.02},
    {"temperature": 1.0, "dynatemp_range": 0.5},
    {"mirostat": 1, "mirostat_tau": 4.0},
    {"mirostat": 2, "mirostat_tau": 4.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.3, "temperature": 1.0},
    {"frequency_penalty": 0.2},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": (), "temperature": 0.5},
    {"strategy": "fsd"},
    {"strategy": "random_fsd"},
    {"logit_bias": {3: 5.0}, "banned_token_ids": [4], "bad_words_ids": [[5], [1, 2]]},
    {"min_tokens": 5, "stop_token_ids": [7], "temperature": 1.0},
    {"samplers": SELECTABLE[::-1], "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95}
    | {"temperature": 1.5, "repetition_penalty": 1.1, "tfs_z": 0.99, "top_a": 0.01}
    | {"dry_multiplier": 0.2, "dry_sequence_breakers": (), "top_n_sigma": 2.0},
    {"samplers": ["min_p", "temperature", "top_k"], "min_p": 0.02, "top_k": 30},
]
STEPS = 4
VOCAB = 5003  # one vocabulary for all tests, for which programs are compiled once


def _traced(*arguments: Any) -> tuple[Array, SamplerState]:
    _TRACED.append(arguments[0].shape)
    return sample(*arguments)


_TRACED: list[tuple[int, ...]] = []
PROGRAM = Jitted(_traced)


class Run:
    """A batch that goes on: what is chosen becomes history. Programs are counted."""

    def __init__(self, rows: list[dict[str, Any]], seeds: list[int], vocab: int) -> None:
        text = [[(seed * 31 + i * i) % 11 for i in range(20)] for seed in seeds]
        made = [params(seed=seed, **fields) for seed, fields in zip(seeds, rows, strict=True)]
        self.rows = batch(*made, past=text, prompts=[12] * len(rows), vocab=vocab)

    def step(self, program: Any, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens chosen, and mirostat's mu."""
        rows = self.rows
        tokens, progress = program(on_device(logits, jnp.float32), *rows)
        history = rows.history.at[rows.slots, rows.lengths].set(tokens)
        self.rows = Batch(
            rows.sampler, progress, history, rows.slots, rows.lengths + 1, rows.prompts
        )
        return np.asarray(tokens), np.asarray(progress.mu)


def logits_of(seeds: list[int], step: int, vocab: int) -> np.ndarray:
    """Each row has its own parameters at any place."""
    return np.stack([np.random.default_rng([s, step]).normal(0, 3, vocab) for s in seeds])


def test_rows_are_batch_invariant() -> None:
    """Together, in another order, in twos and alone: the same tokens, the same mu, to the bit.

    One program serves all parameters, for each number of rows.
    """
    _TRACED.clear()
    seeds = list(range(len(ALL)))

    def run(which: list[int]) -> tuple[np.ndarray, np.ndarray]:
        going = Run([ALL[i] for i in which], which, VOCAB)
        steps = [going.step(PROGRAM, logits_of(which, s, VOCAB)) for s in range(STEPS)]
        tokens, mus = zip(*steps, strict=True)
        return np.stack(tokens), np.stack(mus)

    together, mu = run(seeds)
    mixed = np.random.default_rng(1).permutation(seeds).tolist()
    for which in (mixed, *([i, i + 1] for i in seeds[:-1:2]), *([i] for i in seeds)):
        tokens, mus = run(which)
        assert np.array_equal(tokens, together[:, which]), which
        assert np.array_equal(mus, mu[:, which]), which
    assert np.unique(together, axis=1).shape[1] == len(ALL)
    assert sorted(_TRACED) == [(rows, VOCAB) for rows in (1, 2, len(ALL))]


def test_filtered_logits_have_the_same_bits() -> None:
    vocab = 49152

    def left(which: list[int]) -> np.ndarray:
        rows = Run([ALL[i] for i in which], which, vocab).rows
        x = on_device(logits_of(which, 0, vocab), jnp.float32)
        return np.asarray(FILTER(x, rows.sampler, rows.progress, rows.past))

    together = left(list(range(len(ALL))))
    for row in range(len(ALL)):
        assert np.array_equal(left([row])[0], together[row]), ALL[row]


def test_a_program_of_the_common_samplers_samples_the_same(both_ways: str) -> None:
    if both_ways == "call":
        pytest.skip("it has all samplers")
    plain = [i for i, fields in enumerate(ALL) if set(chain(params(**fields))) <= {*COMMON}]
    assert len(plain) > 6
    which = (plain * len(ALL))[: len(ALL)]  # as many rows as above
    going = [Run([ALL[i] for i in which], which, VOCAB) for _ in range(2)]
    programs = PROGRAM, jax.jit(lambda *arguments: sample(*arguments, samplers=COMMON))
    for step in range(STEPS):
        x = logits_of(which, step, VOCAB)
        full, few = (r.step(p, x)[0] for r, p in zip(going, programs, strict=True))
        assert np.array_equal(full, few)


def test_only_history_stages_depend_on_the_history() -> None:
    seeds = list(range(len(ALL)))
    rows = Run(ALL, seeds, 49152).rows
    x = on_device(logits_of(seeds, 0, 49152), jnp.float32)
    left, other = (
        np.asarray(FILTER(x, rows.sampler, rows.progress, rows.past._replace(tokens=tokens)))
        for tokens in (rows.history, (rows.history + 1) % 11)
    )
    changed = {row for row in seeds if not np.array_equal(left[row], other[row])}
    looking = {"penalties", "dry"}
    looks = {i for i in seeds if looking & set(chain(SamplingParams(**ALL[i])))}
    assert changed <= looks
    assert len(changed) > 2


def test_no_history_is_gathered_outside_a_branch(both_ways: str) -> None:
    """A batch in which nobody looks at it pays nothing for it."""
    if both_ways == "call":
        pytest.skip("it gathers nothing")
    vocab, length = 300, 77_777

    def traced(*arguments: Any) -> tuple[Array, SamplerState]:
        return sample(*arguments)

    rows = Run(ALL[:2], [0, 1], vocab).rows
    rows = rows._replace(history=jnp.zeros((2, length), jnp.int32))
    jaxpr = jax.make_jaxpr(traced)(jnp.zeros((2, vocab)), *rows)

    def used(jaxpr: Any, variable: Any, inside: bool) -> list[str]:
        """The primitives outside branches that read the history."""
        found = []
        for equation in jaxpr.eqns:
            for place, value in enumerate(equation.invars):
                if value is not variable:
                    continue
                name = equation.primitive.name
                if name in ("cond", "scan") or inside:
                    continue
                if name in ("while", "pjit", "jit"):
                    found += inner(equation, place)
                else:
                    found.append(name)
        return found

    def inner(equation: Any, place: int) -> list[str]:
        if equation.primitive.name == "while":
            conditions = equation.params["cond_nconsts"]
            body = equation.params["body_jaxpr"].jaxpr
            return used(body, body.invars[place - conditions], False)
        called = equation.params["jaxpr"].jaxpr
        return used(called, called.invars[place], False)

    leaves = jax.tree.leaves((jnp.zeros(()), *rows))
    place = next(i for i, leaf in enumerate(leaves) if leaf.shape == (2, length))
    assert used(jaxpr.jaxpr, jaxpr.jaxpr.invars[place], False) == []
    gathering = jax.make_jaxpr(lambda t: History(t, *rows[3:]).at(rows.slots[:, None]))(
        rows.history
    )
    assert "gather" in str(gathering)


def test_request_restarts_from_its_row_and_progress() -> None:
    """Their shapes depend on the vocabulary no more than on the request."""
    shapes = set()
    for fields in ALL:
        row = Run([fields], [0], 300).rows
        shapes.add(str(jax.tree.map(jnp.shape, (row.sampler, row.progress))))
    assert len(shapes) == 1
    assert isinstance(row.sampler, SamplingMetadata)


ON_A_GPU = Jitted(sample), Jitted(apply_samplers)
KINDS = ["plain", "ties", "forbidden", "flat", "huge"]


def logits_of_kind(kind: str) -> np.ndarray:
    """For all strategies."""
    x = logits_of(list(range(len(ALL))), 0, VOCAB).astype(np.float32)
    if kind == "ties":
        return np.round(x)
    if kind == "forbidden":
        x[:, ::3] = -np.inf
    elif kind == "flat":
        x[:] = 1.5
    elif kind == "huge":
        x *= 1e30
    return x


@cache
def by_xla(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mirostat's mu, and what is left."""
    x, rows = on_device(logits_of_kind(kind)), Run(ALL, list(range(len(ALL))), VOCAB).rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_calls, "available", lambda: False)
        tokens, progress = SAMPLE(x, *rows)
        left = FILTER(x, rows.sampler, rows.progress, rows.past)
    return np.asarray(tokens), np.asarray(progress.mu), np.asarray(left)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", KINDS)
def test_custom_call_chooses_as_xla(kind: str, isa: Isa, both_ways: str) -> None:
    if both_ways == "xla":
        pytest.skip("once is enough")
    rows = Run(ALL, list(range(len(ALL))), VOCAB).rows
    x, (wanted_tokens, wanted_mu, expected) = on_device(logits_of_kind(kind)), by_xla(kind)
    with build_library.lowered_isa(isa):
        tokens, progress = SAMPLE(x, *rows)
        left = np.asarray(FILTER(x, rows.sampler, rows.progress, rows.past))
    assert np.array_equal(tokens, wanted_tokens)
    assert_allclose(progress.mu, wanted_mu, rtol=1e-5, atol=1e-4)
    assert np.array_equal(left > -np.inf, expected > -np.inf)
    assert_allclose(left, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernels_choose_as_xla(kind: str, both_ways: str) -> None:
    if both_ways == "call":
        pytest.skip("once is enough")
    rows = Run(ALL, list(range(len(ALL))), VOCAB).rows
    x, (wanted_tokens, wanted_mu, expected) = on_device(logits_of_kind(kind)), by_xla(kind)
    with target_platform("gpu", interpret=True):
        tokens, progress = ON_A_GPU[0](x, *rows)
        left = np.asarray(ON_A_GPU[1](x, rows.sampler, rows.progress, rows.past))
    assert np.array_equal(tokens, wanted_tokens)
    assert_allclose(progress.mu, wanted_mu, rtol=1e-5, atol=1e-4)
    assert np.array_equal(left, expected)
