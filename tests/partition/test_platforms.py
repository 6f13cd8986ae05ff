"""Stages on devices of several kinds: operations are those of the kind that is traced for."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jinfer.engine.places import Places
from jinfer.model import AbstractModel, build
from jinfer.opening.settings import open_model
from jinfer.ops import sixteen_bits
from jinfer.ops.backend import backend, target
from jinfer.ops.cache import empty
from jinfer.partition.cutting import abstract_part
from jinfer.partition.divide import whole_of
from jinfer.partition.passes import flow
from jinfer.partition.stages import stage_model
from jinfer.quant import parse_format
from jinfer.quant.tensor import MOST_COLUMNS, abstract
from jinfer.spec.model import ModelSpec


def traced(spec: ModelSpec, model: AbstractModel) -> str:
    """What a stage with the whole model computes."""
    stage = stage_model(spec, model, whole_of(spec), 1, jnp.float32)
    ints: Any = jax.ShapeDtypeStruct((4,), jnp.int32)
    places = Places(ints, ints, ints, ints, ints)
    cache = jax.eval_shape(lambda: empty(stage.model.caches, 2, jnp.float32))
    tables = {"all": jax.ShapeDtypeStruct((4, 2), jnp.int32)}
    leaves = tuple(stage.model.parameters)
    given = (leaves, cache, None, places, tables, None)
    return str(jax.make_jaxpr(lambda *rest: flow(stage, ("logits",), *rest))(*given))


@pytest.mark.skipif(not sixteen_bits.reads_as_stored(), reason="there are no custom calls")
def test_layers_that_were_traced_for_a_cpu_are_not_used_elsewhere(goldens: Path) -> None:
    opened = open_model(goldens / "llama2", {"dtype": "float32"})
    model = build(opened.spec, jnp.float32)
    assert "ffi_call" in traced(opened.spec, model)
    with target("tpu"):
        assert "ffi_call" not in traced(opened.spec, model)
    assert "ffi_call" in traced(opened.spec, model)


def test_weights_are_packed_for_the_kind_of_device() -> None:
    whole = abstract((64, 2048), parse_format("q4"))
    with target("gpu"):
        assert backend() == "gpu"
        assert abstract_part(whole, {}).columns == MOST_COLUMNS
    assert abstract_part(whole, {}).columns == whole.columns < MOST_COLUMNS
