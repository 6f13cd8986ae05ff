"""Memory plan examples: well-known models from published sizes; no weights are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jinfer.loader.weights.storage_plan import choose_storages
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import AUTO, PartitionSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_files import find_family, format_table, with_families
from jinfer.modelspec.toml_tables import nested
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.backend import target_platform
from jinfer.parallel.auto_plan import explain_choice, offload_options
from jinfer.parallel.cost_model import HARDWARE
from jinfer.parallel.memory_plan import MemoryPlan, memory_planner
from jinfer.parallel.placement import ModelToPlace, partition_plan

from .inspect_partition import free_of
from .known_shapes import SHAPES

_MACHINE, _CONTEXT, _TYPE = "rtx4090", 4096, jnp.dtype(jnp.bfloat16)
# The settings, and the plan that follows.
_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "Yi-34B": ({}, {"host_kv_cache": 0.5}, {"host_kv_cache": 0.5, "host_embeddings": True}),
    "Falcon-40B": (
        {},
        {"host_kv_cache": 1.0},
        {"streamed_layers": 15},
        {"cpu_layers": 15},
        {"devices": AUTO},
    ),
}


def _config(name: str) -> dict[str, Any]:
    """A model's config.json."""
    shape = SHAPES[name]
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": _CONTEXT,
    }
    if name.startswith("Falcon"):
        own = {"new_decoder_architecture": True, "num_kv_heads": shape.kv_heads}
        return {**common, **own, "architectures": ["FalconForCausalLM"]}
    own = {"num_key_value_heads": shape.kv_heads, "intermediate_size": shape.inner}
    activated = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
    return {**common, **own, **activated, "architectures": ["LlamaForCausalLM"]}


def _model(name: str, bits: str) -> tuple[ModelSpec, AbstractModel]:
    """The model as it would be stored on a GPU."""
    config = _config(name)
    facts = CheckpointFacts("safetensors", lookup_in(config), source=name)
    family = find_family(facts, config["architectures"], Path(name)).stem
    tables = with_families({"family": family, **nested("quantization.weights", bits)}, Path(name))
    spec = resolve(tables, name, facts, format_table("safetensors"))
    model = build_abstract_model(spec, jnp.bfloat16)
    with target_platform("gpu"):
        storages = choose_storages(model, spec.quantization, {}, "float", name)
        parameters = tuple(
            storages[name].abstract(parameter.shape) if name in storages else parameter
            for name, parameter in zip(model.names, model.parameters, strict=True)
        )
    return spec, replace(model, parameters=parameters)


def plans(bits: str) -> Iterator[tuple[str, Mapping[str, Any], str, MemoryPlan]]:
    """(model, keys of `[partition]`, reason of "auto", plan) on one card of 24 GB.

    With a 16-bit KV cache.
    """
    for name, settings in _SETTINGS.items():
        spec, model = _model(name, bits)
        for keys in settings:
            free, why = free_of(_MACHINE), ""
            chosen: Mapping[str, Any] = keys
            whole = ModelToPlace(spec, model, _CONTEXT, _TYPE, _TYPE)
            with target_platform("gpu"):
                if keys.get("devices") == AUTO:
                    found = offload_options(whole, HARDWARE[_MACHINE], 1, free)
                    why, chosen = explain_choice(found, 1), found[0].keys
                own = replace(whole, spec=replace(spec, partition=PartitionSpec(**chosen)))
                plan = partition_plan(own, dry_run=True)
                memory = memory_planner(plan, own, free).asked()
            yield name, keys, why, memory


def to_text(bits: str) -> str:
    """All examples as text."""
    parts = []
    for name, keys, why, plan in plans(bits):
        said = ", ".join(f"{key} = {str(value).lower()}" for key, value in keys.items())
        title = f"{name}, {bits}, {said or 'all on the card'}:"
        lines = [title, "", *([why, ""] if why else []), str(plan)]
        parts.append("\n".join([*lines, *([plan.problem] if plan.problem else [])]))
    return "\n\n".join(parts)
