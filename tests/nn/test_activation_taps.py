"""Taps of a forward pass: programs without them stay as they are."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer.loader.open_model import open_model
from jinfer.modelspec.formula import compile_formula
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.nn.activation_taps import ActivationTaps, TapError, Tapping, observed, tapped
from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.attention.kv_cache import abstract_cache

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_names_of_a_formula() -> None:
    """Assignments and calls are told apart, and a bare value has the name that it is given."""
    formula = compile_formula(
        "x = f(x)\ny = f(f(x))\nx = x + y\nx * 2",
        path="",
        key="",
        inputs={"x": "vectors"},
        modules=["f"],
        argument_kinds=lambda name: ("vectors",),
        constant=lambda name: None,
    )
    taps = Tapping(ActivationTaps(("*",)), "layer.")
    value, _ = formula.run({"x": jax.numpy.ones(2)}, lambda name, given: given[0] * 3, taps)
    assert {name: float(array[0]) for name, array in taps.captured.items()} == {
        "layer.f@1.input": 1,
        "layer.f@1": 3,
        "layer.x@1": 3,
        "layer.f@2.input": 3,
        "layer.f@2": 9,
        "layer.f.input": 9,
        "layer.f": 27,
        "layer.y": 27,
        "layer.x@2": 30,
        "layer.x": 60,
    }
    assert value[0] == 60


def test_parts_have_the_names_of_their_modules() -> None:
    """A part that is only looked at cannot be edited."""

    class Twice:
        def applied(self, value: Any) -> Any:
            return value * 2

        def select_rows(self, rows: Any) -> Any:
            return self

    def module(given: list[Any]) -> Any:
        observed("seen", lambda: given[0] + 1)
        return tapped("part", given[0])

    taps = Tapping(ActivationTaps(("a.part", "a.seen"), {"a.part": Twice()}))
    assert taps.called("a", module, [jax.numpy.ones(1)])[0] == 2
    assert sorted(taps.captured) == ["a.part", "a.seen"]
    assert tapped("part", 7) == 7  # outside, nothing is tapped
    with pytest.raises(TapError, match=r"a\.seen does not take part"):
        Tapping(ActivationTaps((), {"a.seen": Twice()})).called("a", module, [np.ones(1)])


def _traced(model: AbstractModel, taps: ActivationTaps | None) -> Any:
    ints = jax.ShapeDtypeStruct((8,), np.int32)
    tables = {
        shape.group: jax.ShapeDtypeStruct((1, 1), np.int32) for shape in model.caches.values()
    }
    cache = abstract_cache(model.caches, 1, np.float32)

    def run(leaves: Any, cache: Any, tokens: Any, tables: Any) -> Any:
        batch = ForwardBatch.flat(tokens, tokens, tokens[:1], tables, tokens[:1])
        results, cache = model.module(leaves).decode_all(tokens, batch._replace(taps=taps), cache)
        return results["logits"], cache

    return jax.make_jaxpr(run)(model.parameters, cache, ints, tables)


@pytest.mark.parametrize("name", ["deepseek_v2", "falcon_h1"])
def test_no_operation_is_added(name: str) -> None:
    """A forward pass with taps that no name fits has the operations of one without."""
    model = build_abstract_model(open_model(GOLDENS / name, {}).spec, np.float32)
    model.modules.make()
    without = str(_traced(model, None))
    none = tuple(f"decoder.{i}.nothing" for i in range(9))
    assert str(_traced(model, ActivationTaps(none))) == without
    assert str(_traced(model, ActivationTaps(("decoder.0.attn.scores",)))) != without
