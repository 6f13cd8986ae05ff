"""Matmul with matrices of any kind: plain, in FP8, quantized, with outliers, reordered, LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jinfer.ops.matmul import dense
from jinfer.ops.matmul.quantized import (
    FUSED_ACTIVATIONS,
    index_stack,
    quantized_matmul,
    supports_grouped_quantized,
)
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.calibration_stats import RecordedWeight, record
from jinfer.quant.lora_weight import LowRankSum
from jinfer.quant.scaled_tensor import ScaledTensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

type LinearWeight = (
    Array
    | ScaledTensor
    | QuantizedTensor
    | OutlierTensor
    | ReorderedTensor
    | RecordedWeight
    | LowRankSum
)


def linear(
    x: Float[Array, "*rows inputs"],
    weight: LinearWeight,
    bias: Float[Array, " outputs"] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*rows outputs"]:
    """Computes x @ weight.T + bias, accumulated in float32; the result has x's type or `dtype`.

    Args:
        weight: [outputs, inputs], as checkpoints store it: as fast as the transposed layout, and
            loading copies nothing. A plain one may have another type than x.
    """
    return linears(x, [weight], [bias], dtype)[0]


def linear_of_stack(
    x: Float[Array, "rows inputs"],
    weight: LinearWeight,
    bias: Float[Array, "experts outputs"] | None,
    index: Int[Array, ""],
    where: Bool[Array, " rows"] | None = None,
) -> Float[Array, "rows outputs"]:
    """Computes `linear` with one matrix of a stack [experts, outputs, inputs].

    Args:
        where: rows whose results are used; None: all. It only excludes other rows from calibration.
    """
    if isinstance(weight, LowRankSum):
        y = linear_of_stack(x.astype(jnp.float32), weight.weight, bias, index, where)
        own = LowRankSum(weight, index_stack(weight.a, index), index_stack(weight.b, index))
        return (y + own.term(x)).astype(x.dtype)
    (untapped,) = record(x, [weight], index, where)
    if isinstance(untapped, OutlierTensor):
        y = quantized_matmul(x, [untapped.rounded], index=index)[0]
        y = y + index_stack(untapped.outliers, index).product(x)
    elif isinstance(untapped, ReorderedTensor):
        order = index_stack(untapped.order, index)
        sorted_x = ReorderedTensor(order, untapped.rounded).sorted_inputs(x)
        y = quantized_matmul(sorted_x, [untapped.rounded], index=index)[0]
    elif isinstance(untapped, QuantizedTensor):
        y = quantized_matmul(x, [untapped], index=index)[0]
    else:
        y = dense.dense_matmul(x, [untapped], index=index)[0]
    return _finished(y, None if bias is None else index_stack(bias, index), x.dtype)


def supports_grouped(weight: LinearWeight) -> bool:
    """Whether `grouped_linears` supports this weight here."""
    if isinstance(weight, QuantizedTensor):
        return supports_grouped_quantized(weight)
    return isinstance(weight, Array | ScaledTensor) and dense.supports_grouped_dense(weight)


def grouped_linears(
    x: Float[Array, "rows inputs"],
    weights: Sequence[LinearWeight],
    offsets: Int[Array, " experts_1"],
    activation: str = "none",
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Grouped matmul: rows sorted by expert times the matrices of their experts, in float32.

    Only matrices that have rows are read, each once.

    Args:
        weights: [experts, outputs, inputs], all plain or all quantized; see `supports_grouped`.
        offsets: int32; rows offsets[i] .. offsets[i + 1] - 1 are multiplied with matrix i.
        activation: one of `FUSED_ACTIVATIONS`: there are two weights, gate and up, and one result,
            activation(x @ gate.T) * (x @ up.T).
    """
    if isinstance(weights[0], QuantizedTensor):
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        return quantized_matmul(x, quantized, offsets=offsets, activation=activation)
    plain = [weight for weight in weights if isinstance(weight, Array | ScaledTensor)]
    return dense.dense_matmul(x, plain, offsets=offsets, activation=activation)


def fuses_activation(gate: LinearWeight, up: LinearWeight, activation: str) -> bool:
    """Whether the activation function can be fused into the matmul with gate and up here."""
    if activation not in FUSED_ACTIVATIONS:
        return False
    if isinstance(gate, Array | ScaledTensor) and isinstance(up, Array | ScaledTensor):
        return dense.reads_16_bit_weights()
    if not (isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor)):
        return False
    return gate.words.shape == up.words.shape and gate.format == up.format


def linears(
    x: Float[Array, "*rows inputs"],
    weights: Sequence[LinearWeight],
    biases: Sequence[Float[Array, " outputs"] | None],
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """Computes `linear` with several weights: one call for quantized, one for plain weights."""
    parameters = weights
    weights = record(
        x,
        [
            parameter.weight if isinstance(parameter, LowRankSum) else parameter
            for parameter in parameters
        ],
    )
    codes = [weight.rounded if isinstance(weight, OutlierTensor) else weight for weight in weights]
    quantized = [weight for weight in codes if isinstance(weight, QuantizedTensor)]
    plain = [w for w in codes if not isinstance(w, QuantizedTensor | ReorderedTensor)]
    of_quantized = iter(
        quantized_matmul(x.reshape(-1, x.shape[-1]), quantized) if quantized else ()
    )
    of_plain = iter(dense.dense_matmul(x, plain) if plain else ())
    results = []
    for whole, weight, code, bias in zip(parameters, weights, codes, biases, strict=True):
        if isinstance(code, ReorderedTensor):
            rows = code.sorted_inputs(x).reshape(-1, x.shape[-1])
            y = quantized_matmul(rows, [code.rounded])[0]
            y = y.reshape(*x.shape[:-1], code.rounded.outputs)
        elif isinstance(code, QuantizedTensor):
            y = next(of_quantized).reshape(*x.shape[:-1], code.outputs)
        else:
            y = next(of_plain)
        if isinstance(weight, OutlierTensor):
            y = y + weight.outliers.product(x)
        if isinstance(whole, LowRankSum):
            y = y + whole.term(x)
        results.append(_finished(y, bias, x.dtype if dtype is None else dtype))
    return tuple(results)


def _finished(y: Array, bias: Array | None, dtype: DTypeLike) -> Array:
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y.astype(dtype)


def gated_linear(
    x: Float[Array, "*rows inputs"], gate: LinearWeight, up: LinearWeight, activation: str
) -> Float[Array, "*rows outputs"] | None:
    """Computes activation(x @ gate.T) * (x @ up.T) in one fused operation; None: unsupported."""
    if not fuses_activation(gate, up, activation):
        return None
    if isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
        (y,) = quantized_matmul(x.reshape(-1, x.shape[-1]), [gate, up], activation=activation)
        return y.reshape(*x.shape[:-1], gate.outputs).astype(x.dtype)
    plain = [weight for weight in (gate, up) if isinstance(weight, Array | ScaledTensor)]
    return dense.dense_matmul(x, plain, activation=activation)[0].astype(x.dtype)


def take_rows(
    weight: LinearWeight, rows: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape inputs"]:
    """Looks up embeddings: rows of a matrix, dequantized to this type."""
    table: Any = weight.weight if isinstance(weight, RecordedWeight) else weight
    if isinstance(table, QuantizedTensor | OutlierTensor | ReorderedTensor | ScaledTensor):
        return table.take(rows, dtype)
    return table[rows].astype(dtype)
