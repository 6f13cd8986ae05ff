"""Products with weight matrices, plain and quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jinfer.ops.quantized import FUSED, pick, products
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration import Tapped, record

type Weight = Array | QuantizedTensor | OutlierTensor | Tapped


def linear(
    x: Float[Array, "*rows inputs"],
    weight: Weight,
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*rows outputs"]:
    """x @ weight.T + bias, accumulated in float32, in x's type.

    Args:
        weight: [outputs, inputs], as files store it: on XLA:CPU this is as fast as the transposed
            layout, and loading copies nothing.
    """
    return linears(x, [weight], [bias])[0]


def linear_of(
    x: Float[Array, "rows inputs"],
    weight: Weight,
    bias: Float[Array, "experts outputs"] | None,
    index: Int[Array, ""],
    where: Bool[Array, " rows"] | None = None,
) -> Float[Array, "rows outputs"]:
    """`linear` with one of a stack of weights [experts, outputs, inputs].

    Args:
        where: rows whose results count; None: all. The others are only left out of a calibration.
    """
    (weight,) = record(x, [weight], index, where)
    if isinstance(weight, OutlierTensor):
        y = products(x, [weight.rounded], index=index)[0]
        y = y + pick(weight.outliers, index).product(x)
    elif isinstance(weight, QuantizedTensor):
        y = products(x, [weight], index=index)[0]
    else:
        y = _dense(x, pick(weight, index))
    return _finished(y, None if bias is None else pick(bias, index), x.dtype)


def linears(
    x: Float[Array, "*rows inputs"],
    weights: Sequence[Weight],
    biases: Sequence[Float[Array, " outputs"] | None],
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """`linear` with several weights; those that are quantized share one call."""
    weights = record(x, weights)
    codes = [weight.rounded if isinstance(weight, OutlierTensor) else weight for weight in weights]
    together = [weight for weight in codes if isinstance(weight, QuantizedTensor)]
    quantized = iter(products(x.reshape(-1, x.shape[-1]), together) if together else ())
    results = []
    for weight, code, bias in zip(weights, codes, biases, strict=True):
        if isinstance(code, QuantizedTensor):
            y = next(quantized).reshape(*x.shape[:-1], code.outputs)
        else:
            y = _dense(x, weight)
        if isinstance(weight, OutlierTensor):
            y = y + weight.outliers.product(x)
        results.append(_finished(y, bias, x.dtype))
    return tuple(results)


def _dense(x: Array, weight: Array) -> Array:
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contracted, preferred_element_type=jnp.float32)


def _finished(y: Array, bias: Array | None, dtype: DTypeLike) -> Array:
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y.astype(dtype)


def gated_linear(
    x: Float[Array, "*rows inputs"], gate: Weight, up: Weight, activation: str
) -> Float[Array, "*rows outputs"] | None:
    """activation(x @ gate.T) * (x @ up.T) as one operation, where there is one; else None."""
    if not (isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor)):
        return None
    if activation not in FUSED or gate.words.shape != up.words.shape or gate.format != up.format:
        return None
    (y,) = products(x.reshape(-1, x.shape[-1]), [gate, up], activation=activation)
    return y.reshape(*x.shape[:-1], gate.outputs).astype(x.dtype)


def take_rows(
    weight: Weight, rows: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape inputs"]:
    """Rows of a matrix, in full."""
    table: Any = weight.weight if isinstance(weight, Tapped) else weight
    if isinstance(table, QuantizedTensor | OutlierTensor):
        return table.take(rows, dtype)
    return table[rows]
