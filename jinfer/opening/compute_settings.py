"""Context length, dtype, and types of activations and KV cache, where a specification says auto."""

from __future__ import annotations

import jax
import numpy as np

from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.cache_dtype import Kind, parse_cache_dtype
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.ops.matmul.dense import reads_16_bit_weights
from jinfer.quant.quantized_tensor import Activations


def context_length(spec: ModelSpec) -> int:
    """Tokens that a sequence may have. Raises `SpecError`."""
    trained, asked = spec.dims.get("context"), spec.engine.context
    if asked and trained and asked > trained * spec.dynamic_factor:
        raise SpecError(
            spec.path,
            "engine.context",
            f"{asked} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return asked or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def compute_dtype(name: str) -> str:
    """The type of weights and computation, of a specification's `dtype`."""
    if name != "auto":
        return name
    # XLA:CPU converts all weights of a one-row product in bfloat16 first.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def activation_type(spec: ModelSpec) -> Activations:
    """How products on a CPU round activations; who asks for float32 wants the numbers it gives."""
    named = spec.quantization.activations
    if named != "auto":
        return named
    return "float" if spec.dtype == "float32" else "int8"


def adapter_dtype(spec: ModelSpec) -> str:
    """The type of LoRA adapters in slots: `dtype` if it is named, else 16 bits on a CPU, too.

    `engine.adapter_dtype` has the say if it is not "auto".
    """
    if spec.engine.adapter_dtype != "auto":
        return spec.engine.adapter_dtype
    half = spec.dtype == "auto" and reads_16_bit_weights()
    return "float16" if half else compute_dtype(spec.dtype)


def kv_cache_type(spec: ModelSpec) -> Kind:
    """The type of the KV cache: `dtype` if it is named, else 16 bits on a CPU, too."""
    named = spec.quantization.kv_cache
    if named != "auto":
        return parse_cache_dtype(named)
    on_cpu = spec.dtype == "auto" and jax.default_backend() == "cpu"
    return parse_cache_dtype("f16") if on_cpu else np.dtype(compute_dtype(spec.dtype))
