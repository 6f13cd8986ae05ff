"""Stages on devices of several kinds: operations are those of the kind that is traced for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.loader.open_model import open_model
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.attention.kv_cache import zero_cache
from jinfer.ops.backend import backend, target_platform
from jinfer.ops.matmul import dense
from jinfer.parallel.layer_plan import ModelSlice, PartitionPlan, PlannedStage, whole_model
from jinfer.parallel.placement import ModelToPlace, make_stages, stage_models
from jinfer.parallel.shard_params import abstract_shard
from jinfer.parallel.stage_model import StageModel, decoder_forward, make_stage_model
from jinfer.quant import parse_format
from jinfer.quant.quantized_tensor import MAX_COLUMNS, QuantizedTensor, abstract, columns_of


def traced(spec: ModelSpec, model: AbstractModel) -> str:
    """What a stage with the whole model computes."""
    stage = make_stage_model(spec, model, whole_model(spec), 1, jnp.float32)
    ints: Any = jax.ShapeDtypeStruct((4,), jnp.int32)
    cache = jax.eval_shape(lambda: zero_cache(stage.model.caches, 2, jnp.float32))
    tables: Any = {"all": jax.ShapeDtypeStruct((4, 2), jnp.int32)}
    leaves = tuple(stage.model.parameters)
    given = (leaves, cache, None, FlatBatch(ints, ints, ints, ints, ints, tables), None)
    return str(
        jax.make_jaxpr(lambda *rest: decoder_forward(stage, ("logits",), False, *rest))(*given)
    )


@pytest.mark.skipif(not dense.reads_16_bit_weights(), reason="there are no custom calls")
def test_layers_that_were_traced_for_a_cpu_are_not_used_elsewhere(goldens: Path) -> None:
    opened = open_model(goldens / "llama2", {"dtype": "float32"})
    model = build_abstract_model(opened.spec, jnp.float32)
    assert "ffi_call" in traced(opened.spec, model)
    with target_platform("tpu"):
        assert "ffi_call" not in traced(opened.spec, model)
    assert "ffi_call" in traced(opened.spec, model)


def test_weights_are_packed_for_the_kind_of_device() -> None:
    whole = abstract((64, 2048), parse_format("q4"))
    with target_platform("gpu"):
        assert backend() == "gpu"
        assert abstract_shard(whole, {}).columns == MAX_COLUMNS
    assert abstract_shard(whole, {}).columns == whole.columns < MAX_COLUMNS


def test_a_stage_on_the_host_beside_a_gpu_has_weights_packed_for_a_cpu(goldens: Path) -> None:
    spec = open_model(goldens / "gguf_llama2", {}).spec
    whole = build_abstract_model(spec, jnp.float32)
    matrices = tuple(
        abstract(one.shape, parse_format("q4")) if role == "matrix" else one
        for one, role in zip(whole.parameters, whole.roles, strict=True)
    )
    model = replace(whole, parameters=matrices)
    given = ModelToPlace(spec, model, 256, jnp.float32, jnp.dtype(jnp.float32))
    parts = (
        ModelSlice({"decoder": range(1)}, True, False),
        ModelSlice({"decoder": range(1, 2)}, False, True),
    )
    plan = PartitionPlan((PlannedStage(("cpu",), parts[0]), PlannedStage(("0",), parts[1])), 1)
    with target_platform("gpu"):
        host, device = stage_models(plan, given)
        stages = make_stages(plan, given)
    assert columns(host) == {columns_of(parse_format("q4"))}
    assert columns(device) == {MAX_COLUMNS}
    assert [columns(stage.model) for stage in stages] == [columns(host), columns(device)]


def columns(stage: StageModel) -> set[int]:
    """Columns of a superblock of a stage's quantized matrices."""
    return {one.columns for one in stage.model.parameters if isinstance(one, QuantizedTensor)}
