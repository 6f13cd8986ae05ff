"""The stages that the custom call knows, the programs that there are, what the call is given."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu.sample import SamplerLayout
from jinfer.ops import sampler_calls
from jinfer.sampling.sampler import _operands
from jinfer.sampling.sampler_chain import is_plain, stage_sets
from jinfer.sampling.sampling_metadata import COUNTS, LAST_STAGE, NUMBERS
from jinfer.sampling.stages import STAGES
from tests.sampling.batches import batch, params

pytestmark = pytest.mark.skipif(not sampler_calls.available(), reason="no custom calls")


def test_the_call_has_names_of_the_tables_in_their_order() -> None:
    """A column or stage that only the tables have is computed by XLA."""
    for known, table in zip(sampler_calls.layout(), (NUMBERS, COUNTS, STAGES), strict=True):
        assert known == tuple(name for name in table if name in known)


def test_operands_are_not_copied_if_all_stages_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler_calls, "layout", lambda: SamplerLayout(NUMBERS, COUNTS, STAGES))
    rows = batch(params(temperature=1.0, top_k=5))
    assert _operands(rows.sampler, rows.progress) == (*rows.sampler, *rows.progress)
    assert stage_sets() == (STAGES,)


def test_unknown_stage_is_computed_by_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = tuple(name for name in reversed(STAGES) if name != "top_a")
    layout = SamplerLayout(NUMBERS[::-1], COUNTS[3:], stages)
    monkeypatch.setattr(sampler_calls, "layout", lambda: layout)
    assert stage_sets() == (tuple(name for name in STAGES if name != "top_a"), STAGES)
    assert sampler_calls.knows(stage_sets()[0])
    assert not sampler_calls.knows(STAGES)
    assert not is_plain(params(temperature=1.0, top_a=0.2))
    assert is_plain(params(temperature=1.0, top_p=0.9, xtc_probability=0.5))

    rows = batch(params(temperature=0.7, top_k=5, min_p=0.1), params())
    numbers, counts, _, numbered, *_ = map(np.asarray, _operands(rows.sampler, rows.progress))
    assert np.array_equal(numbers, rows.sampler.numbers[:, ::-1])
    assert np.array_equal(counts, rows.sampler.counts[:, 3:])
    named = [[*stages, None][number] for number in numbered[0]]
    assert named == ["temperature", "top_k", "min_p"] + [None] * (len(stages) - 3)
    assert (numbered[1] == len(stages)).all()
    assert jnp.all(rows.sampler.stages[1] == LAST_STAGE)
