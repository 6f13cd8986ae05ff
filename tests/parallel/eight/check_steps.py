"""A new kind of step is one line of the table, for one device and for several."""

from typing import Any

import numpy as np
import pytest

from jinfer.engine.runner import step_table
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.step_forms import ForwardStep
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.runner.step_table import StepInputs, abstract_flat_batch
from tests.parallel.eight.models import opened


def largest(inputs: StepInputs, key: StepKey) -> ForwardStep:
    """The largest logit after each token of a sequence."""

    def finish(state: None, results: Any, *_: Any) -> tuple[Any]:
        return (results["logits"].max(axis=-1),)

    return ForwardStep((abstract_flat_batch(key.tokens, 1, inputs.tables(1)),), finish)


@pytest.mark.parametrize("devices", ["0;1", "0&1;2&3"])
def test_a_new_step(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = "largest"
    monkeypatch.setattr(step_table, "STEPS", {**step_table.STEPS, kind: largest})
    tokens = [3, 7, 11, 30]
    found = []
    for keys in ({}, {"devices": devices}):
        with opened("llama2", **keys) as llm:
            engine = llm.session.engine
            length = np.array([len(tokens)], np.int32)
            tables = {
                name: np.zeros((1, engine.runner.programs.sizes.table), np.int32)
                for name in engine.runner.programs.sizes.blocks
            }
            positions = np.arange(len(tokens), dtype=np.int32)
            ids, rows = np.array(tokens, np.int32), np.zeros(len(tokens), np.int32)
            batch = FlatBatch(ids, rows, positions, length, 0 * length, tables)  # type: ignore[arg-type]
            program = engine.runner.programs.get(StepKey(kind, len(tokens), rows=1))
            cache, values = program(engine.runner.leaves, engine.runner.cache, batch)
            engine.runner.set_cache(cache)
            found.append(np.asarray(values))
            np.testing.assert_allclose(values, llm.logits([tokens])[0].max(axis=-1), atol=1e-5)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)
