"""Overrides of a specification: keys set by the user, and other engines' names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.modelspec.model_spec import EngineSpec, PromptSpec
from jinfer.modelspec.partition_table import PartitionSpec
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.modelspec.resolve_spec import TOP_KEYS
from jinfer.modelspec.speculation_table import SpeculationSpec
from jinfer.modelspec.table_reader import fields
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.sampling.param_keywords import is_parameter
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.unknown_params import LOGITS, LORA

_TABLES: Mapping[str, Any] = {
    "engine": EngineSpec,
    "quantization": QuantizationSpec,
    "partition": PartitionSpec,
    "speculation": SpeculationSpec,
    "prompt": PromptSpec,
}
_DEVICE = (
    "the environment variable JAX_PLATFORMS chooses (cpu, cuda), and partition.devices says which "
    "devices hold which part of the model"
)
_MAPPED = "weights are always mapped from their file"
_OWN = "it is chosen for the device by itself"

# vLLM's, llama.cpp's and transformers' names: the key here, or a sentence.
FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        ("n_ctx", "ctx_size", "num_ctx", "max_model_len", "max_seq_len", "max_seq_length"),
        "engine.context",
    ),
    **dict.fromkeys(("context_length", "model_max_length"), "engine.context"),
    **dict.fromkeys(("max_num_seqs", "n_parallel", "parallel", "n_seq_max"), "engine.slots"),
    **dict.fromkeys(("n_batch", "n_ubatch", "max_num_batched_tokens"), "engine.prefill_chunk"),
    **dict.fromkeys(("gpu_memory_utilization", "num_gpu_blocks_override"), "engine.kv_tokens"),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v"), "quantization.kv_cache"),
    **dict.fromkeys(("type_k", "type_v"), "quantization.kv_cache"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_config"), "quantization.weights"
    ),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "partition.mesh"),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "ngl"), "partition.cpu_layers"),
    "cpu_offload_gb": "partition.streamed_layers",
    "split_mode": "partition.devices",
    "tensor_split": "partition.devices",
    **dict.fromkeys(
        ("draft_model", "speculative_model", "speculative_config"), "speculation.draft"
    ),
    "chat_format": "prompt.chat_template",
    "system_prompt": "prompt.system",
    "torch_dtype": "dtype",
    **dict.fromkeys(("n_threads", "num_threads"), "threads=... is the number of cores"),
    **dict.fromkeys(("device", "device_map", "main_gpu", "gpu", "cuda"), _DEVICE),
    **dict.fromkeys(("lora", "lora_path", "lora_adapters", "enable_lora", "adapter"), LORA),
    **dict.fromkeys(("logits_processor", "logits_processors"), LOGITS),
    **dict.fromkeys(("use_mmap", "use_mlock", "low_cpu_mem_usage", "load_format"), _MAPPED),
    **dict.fromkeys(("attn_implementation", "flash_attn", "attention_backend"), _OWN),
    "enable_prefix_caching": "what prompts begin with alike is always computed once",
    "enforce_eager": "programs are always compiled",
    **dict.fromkeys(
        ("embedding", "task", "runner", "convert"), "embed(...) gives vectors of any model"
    ),
    "logits_all": "logits(...) gives those of every token",
    "trust_remote_code": "no code of a checkpoint is run",
    "revision": "write it into the source: hf://owner/name@revision",
    "cache_dir": "HF_HOME says where the hub's files lie, JINFER_CACHE where compiled programs do",
    "local_files_only": "HF_HUB_OFFLINE=1 opens what the hub's cache has",
    "model": "the model is the first argument: LLM(source)",
    "model_path": "the model is the first argument: LLM(source)",
    "verbose": "the logger 'jinfer' says what there is to say, and progress=True shows a bar",
    "mmproj": "there are no images",
    "limit_mm_per_prompt": "there are no images",
}


# Of tables that other engines have as one value, the key of that value.
_MAIN: Mapping[str, str] = {
    "quantization": "quantization.weights",
    "speculation": "speculation.draft",
    "partition": "partition.devices",
    "prompt": "prompt.chat_template",
    "engine": "engine.context",
}


def override_tables(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that the user sets (dotted names), as tables to be laid over a specification.

    Raises:
        RequestError, SpecError: a key that there is not.
    """
    check_keywords(overrides)
    tables: dict[str, Any] = {}
    for key, value in overrides.items():
        tables = merge(tables, nested(key, value))
    return tables


def check_keywords(given: Mapping[str, Any]) -> None:
    """Leads from names that no specification has to those that stand for them.

    Args:
        given: keys of a specification, dotted or not, and their values.

    Raises:
        RequestError: one is another engine's, a key without its table, a table without a key, or a
            request's parameter.
    """
    for key, value in given.items():
        if key in _MAIN and isinstance(value, str | int | float):
            call = f"LLM(source, **{{{_MAIN[key]!r}: {value!r}}})"
            raise RequestError(f"{key} is a table; this may be {_MAIN[key]}: {call}")
        name = key.partition(".")[0] if isinstance(key, str) else ""
        if name in TOP_KEYS:
            continue
        found = FOREIGN.get(name) or next(
            (f"{table}.{name}" for table, spec in _TABLES.items() if name in fields(spec)), ""
        )
        if not found and is_parameter(name):
            found = (
                f"it is a parameter of requests, for generate and SamplingParams; "
                f"generation.{name} is its default"
            )
        if not found:
            continue  # what resolves specifications says what is allowed
        if " " not in found:
            simple = isinstance(value, int | float | str) and found == "engine.context"
            shown = repr(value)[:40] if simple else "..."
            call = f"LLM(source, **{{{found!r}: {shown}}})"
            found = f"here it is {found}: {call}, on the command line --set {found}={shown}"
        raise RequestError(f"there is no key {name!r}: {found}")
