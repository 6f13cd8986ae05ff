"""The samplers that the custom call knows, the programs that there are, what the call is given."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu.sample import SamplerLayout
from jinfer.ops import sampler_calls
from jinfer.sampling.sampler import _operands
from jinfer.sampling.sampler_chain import is_plain, sampler_sets
from jinfer.sampling.samplers import SAMPLER_NAMES
from jinfer.sampling.sampling_metadata import COUNTS, END_OF_CHAIN, NUMBERS
from tests.sampling.batches import batch, params

pytestmark = pytest.mark.skipif(not sampler_calls.available(), reason="no custom calls")


def test_the_call_has_names_of_the_tables_in_their_order() -> None:
    """A column or sampler that only the tables have is computed by XLA."""
    for known, table in zip(sampler_calls.layout(), (NUMBERS, COUNTS, SAMPLER_NAMES), strict=True):
        assert known == tuple(name for name in table if name in known)


def test_operands_are_not_copied_if_all_samplers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sampler_calls, "layout", lambda: SamplerLayout(NUMBERS, COUNTS, SAMPLER_NAMES)
    )
    rows = batch(params(temperature=1.0, top_k=5))
    assert _operands(rows.sampler, rows.progress) == (*rows.sampler, *rows.progress)
    assert sampler_sets() == (SAMPLER_NAMES,)


def test_unknown_sampler_is_computed_by_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samplers = tuple(name for name in reversed(SAMPLER_NAMES) if name != "top_a")
    layout = SamplerLayout(NUMBERS[::-1], COUNTS[3:], samplers)
    monkeypatch.setattr(sampler_calls, "layout", lambda: layout)
    assert sampler_sets() == (
        tuple(name for name in SAMPLER_NAMES if name != "top_a"),
        SAMPLER_NAMES,
    )
    assert sampler_calls.knows(sampler_sets()[0])
    assert not sampler_calls.knows(SAMPLER_NAMES)
    assert not is_plain(params(temperature=1.0, top_a=0.2))
    assert is_plain(params(temperature=1.0, top_p=0.9, xtc_probability=0.5))

    rows = batch(params(temperature=0.7, top_k=5, min_p=0.1), params())
    numbers, counts, _, numbered, *_ = map(np.asarray, _operands(rows.sampler, rows.progress))
    assert np.array_equal(numbers, rows.sampler.numbers[:, ::-1])
    assert np.array_equal(counts, rows.sampler.counts[:, 3:])
    named = [[*samplers, None][number] for number in numbered[0]]
    assert named == ["temperature", "top_k", "min_p"] + [None] * (len(samplers) - 3)
    assert (numbered[1] == len(samplers)).all()
    assert jnp.all(rows.sampler.chain[1] == END_OF_CHAIN)
