"""What tests of converted checkpoints share: a model's parameters by name, and their comparison."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer.loader.open_model import open_model
from jinfer.loader.weights import load_weights
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.nn.abstract_model import build_abstract_model

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL = GOLDENS / "llama2"
IDS = [1, 5, 9, 2, 40, 7, 3]
SMALL = {"threshold": 0, "method": "mse"}


def leaves(source: Path, **quantization: Any) -> dict[str, Any]:
    """The parameters of a model, by name, with keys of `[quantization]`."""
    return load(source, {f"quantization.{key}": value for key, value in quantization.items()})


def load(source: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a model, by name, with any keys of its specification.

    Plain ones stay so, as in a converted checkpoint, which is mapped as it is.
    """
    opened = open_model(source, overrides)
    model = build_abstract_model(opened.spec, opened.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jinfer.loader.weights.storage_plan.f16_as_int_is_faster", lambda: False)
        plan = plan_weights(model, opened.spec, opened.checkpoint, opened.activations)
    return dict(zip(model.names, load_weights.load(plan), strict=True))


def check_equal(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that parameters are the same, bit for bit, and shared alike."""
    assert ours.keys() == expected.keys()
    for name, leaf in ours.items():
        assert str(jax.tree.structure(leaf)) == str(jax.tree.structure(expected[name])), name
        for a, b in zip(jax.tree.leaves(leaf), jax.tree.leaves(expected[name]), strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b), name
    assert len({id(leaf) for leaf in ours.values()}) == len({id(w) for w in expected.values()})


def in_metadata(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Damage to one table in a header's metadata, for whoever reads and writes the header."""

    def apply(header: dict[str, Any]) -> None:
        stated = header["__metadata__"]
        table = json.loads(stated[key])
        change(table)
        stated[key] = json.dumps(table)

    return apply
