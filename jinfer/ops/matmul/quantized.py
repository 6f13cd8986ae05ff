"""Quantized matmul: chooses the implementation (CPU custom call, GPU kernel, or XLA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import matmul_call as cpu
from jinfer.ops.activation import FUNCTIONS
from jinfer.ops.backend import (
    DIFFERENTIABLE,
    backend,
    has_cpu_calls,
    interpreted,
    selected_backend,
)
from jinfer.ops.disable_kernels import KernelKind, kernels_enabled
from jinfer.ops.matmul.quantized_xla import (
    dequantized_matmul,
    differentiable_matmul,
    quantized_matmul_xla,
)
from jinfer.quant import QuantizedTensor
from jinfer.quant.quantized_tensor import MAX_COLUMNS

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Activation functions that can be fused into the matmul with gate and up.
FUSED_ACTIVATIONS = {name: FUNCTIONS[name] for name in ("silu", "gelu_tanh", "relu")}

_XLA_PRODUCTS = {"gpu": dequantized_matmul, DIFFERENTIABLE: differentiable_matmul}


def quantized_matmul(
    x: Float[Array, "rows inputs"],
    weights: Sequence[QuantizedTensor],
    *,
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
    activation: str = "none",
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Computes x @ weight.T for each weight, in float32.

    Args:
        index: the matrix to use of each stack; the others are not read.
        offsets: grouped matmul: rows offsets[i] .. offsets[i + 1] - 1 use matrix i of a stack; the
            other rows of the result are undefined. Requires `supports_grouped_quantized`.
        activation: one of `FUSED_ACTIVATIONS`, or "none": there are two weights, gate and up, and
            one result, activation(x @ gate.T) * (x @ up.T).
    """
    x = x.astype(jnp.float32)
    if has_cpu_calls():
        coded = [_cpu_operand(weight) for weight in weights]
        books = {weight.codebook for weight in coded if weight.codebook is not None}
        if len(books) > 1:  # a call has one codebook; activations are only fused for equal formats
            which: dict[str, Any] = {"index": index, "offsets": offsets}
            return tuple(quantized_matmul(x, [weight], **which)[0] for weight in weights)
        if all(cpu.supports(weight) for weight in coded):
            return cpu.quantized_linear(
                x,
                coded,
                mode=weights[0].activations,
                activation=activation,
                index=index,
                offsets=offsets,
            )
    # Only mixtures of experts have stacks.
    kind: KernelKind = "products" if index is None and offsets is None else "experts"
    on_gpu = backend() == "gpu"
    if on_gpu and kernels_enabled(kind) and all(_gpu_kernels_support(weight) for weight in weights):
        return _gpu_matmul(x, weights, index, offsets, activation)
    if index is not None:
        weights = [index_stack(weight, index) for weight in weights]
    product = _XLA_PRODUCTS.get(backend(), quantized_matmul_xla)
    return apply_activation(tuple(product(x, weight) for weight in weights), activation)


def apply_activation(results: tuple[Array, ...], activation: str) -> tuple[Array, ...]:
    """Returns the results of a matmul unchanged, or activation(gate) * up."""
    if activation == "none":
        return results
    gate, up = results
    return (FUSED_ACTIVATIONS[activation](gate) * up,)


def supports_grouped_quantized(weight: QuantizedTensor) -> bool:
    """Whether `quantized_matmul` supports rows sorted by this stack's matrices (grouped matmul)."""
    if backend() == "gpu":
        return kernels_enabled("experts") and _gpu_kernels_support(weight)
    return has_cpu_calls() and cpu.supports(_cpu_operand(weight))


def _gpu_kernels_support(weight: QuantizedTensor) -> bool:
    """Whether the GPU kernels support the format; XLA dequantizes all others."""
    format = weight.format
    one_level, two_levels = (32, 64, 128), (16, 32)
    known = format.block in (two_levels if format.two_level else one_level)
    if format.two_level and format.per_code > 1:
        return False
    if format.codebook is not None and len(format.codebook) != 16:  # the kernels look up 16
        return False
    return known and weight.columns == MAX_COLUMNS // format.per_code


def _gpu_matmul(
    x: Array,
    weights: Sequence[QuantizedTensor],
    index: Array | None,
    offsets: Array | None,
    activation: str,
) -> tuple[Array, ...]:
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from jinfer.ops.matmul.quantized_gpu import packed_matmul
    from kernels_pallas.matmul.grouped import grouped_quantized_matmul
    from kernels_pallas.matmul.weight_layout import PackedMatrix

    packed = [
        PackedMatrix(
            weight.words,
            weight.scales,
            weight.format.levels,
            weight.format.block,
            weight.inputs,
            weight.steps,
            weight.format.codebook,
        )
        for weight in weights
    ]
    which = None if index is None else index.reshape(1).astype(jnp.int32)
    gated, kind = activation == "silu", selected_backend()
    if offsets is not None:
        own: dict[str, Any] = {"backend": kind, "interpret": interpreted()}
        results = grouped_quantized_matmul(x, offsets, packed, index=which, gated=gated, **own)
    else:
        results = packed_matmul(x, packed, index=which, gated=gated, backend=kind)
    return results if gated else apply_activation(results, activation)


def index_stack(stacked: Any, index: Int[Array, ""]) -> Any:
    """Returns one element of a stack: an array, or a tree of arrays."""
    return jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, index, keepdims=False), stacked)


def _cpu_operand(weight: QuantizedTensor) -> cpu.QuantizedMatrix:
    format = weight.format
    return cpu.QuantizedMatrix(
        weight.words,
        weight.scales,
        weight.steps,
        weight.outputs,
        format.block,
        format.per_code,
        format.zero if format.symmetric else 0,
        format.codebook,
    )
