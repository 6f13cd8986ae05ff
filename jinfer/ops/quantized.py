"""Products with quantized matrices: where and how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.cpu import linear as cpu
from jinfer.ops import switches
from jinfer.ops.backend import backend
from jinfer.ops.quantized_xla import product_xla
from jinfer.quant import QuantizedTensor

# Activation functions that the product with a gate can apply, so that nothing is written between.
FUSED: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def products(
    x: Float[Array, "rows inputs"],
    weights: Sequence[QuantizedTensor],
    *,
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
    activation: str = "none",
) -> tuple[Float[Array, "rows outputs"], ...]:
    """x @ weight.T for each weight, in float32.

    Args:
        index: which matrix of each stack; the others are not read.
        offsets: of a stack, rows offsets[i] .. offsets[i + 1] - 1 go with matrix i; others are
            undefined. Only where `in_calls` says so.
        activation: one of `FUSED`, "none" for none: there are two weights, gate and up, and the one
            result is activation(x @ gate.T) * (x @ up.T).
    """
    x = x.astype(jnp.float32)
    if backend() == "cpu" and cpu.available():
        coded = [_coded(weight) for weight in weights]
        books = {each.codebook for each in coded if each.codebook is not None}
        if len(books) > 1:  # a call has one codebook; activations are only fused for equal formats
            which: dict[str, Any] = {"index": index, "offsets": offsets}
            return tuple(products(x, [weight], **which)[0] for weight in weights)
        if all(cpu.supports(each) for each in coded):
            return cpu.coded_linear(
                x,
                coded,
                mode=weights[0].activations,
                activation=activation,
                index=index,
                offsets=offsets,
            )
    here = backend() == "gpu" and switches.kernels()
    if here and all(_in_kernels(weight) for weight in weights):
        return _on_gpu(x, weights, index, activation)
    if index is not None:
        weights = [pick(weight, index) for weight in weights]
    results = tuple(product_xla(x, weight) for weight in weights)
    if activation == "none":
        return results
    gate, up = results
    return (FUSED[activation](gate) * up,)


def in_calls(weight: QuantizedTensor) -> bool:
    """Whether a custom call of XLA:CPU multiplies with it."""
    on_cpu = backend() == "cpu" and cpu.available()
    return on_cpu and cpu.supports(_coded(weight))


def _in_kernels(weight: QuantizedTensor) -> bool:
    """Whether the GPU kernels read the format; all others are decoded by XLA."""
    format = weight.format
    return format.codebook is None and not format.two_level and format.block in (32, 64, 128)


def _on_gpu(
    x: Array, weights: Sequence[QuantizedTensor], index: Array | None, activation: str
) -> tuple[Array, ...]:
    # Imported here: half a second, which only those pay who have a GPU.
    from jinfer.ops.packed_product import packed_product
    from kernels_pallas.layout import Packed

    packed = [Packed(w.words, w.scales, w.format.levels, w.format.block, w.inputs) for w in weights]
    which = None if index is None else index.reshape(1).astype(jnp.int32)
    if activation in ("none", "silu"):
        return packed_product(x, packed, index=which, gated=activation == "silu")
    gate, up = packed_product(x, packed, index=which)
    return (FUSED[activation](gate) * up,)


def pick(stacked: Any, index: Int[Array, ""]) -> Any:
    """One array, or one matrix, of a stack."""
    return jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, index, keepdims=False), stacked)


def _coded(weight: QuantizedTensor) -> cpu.Coded:
    format = weight.format
    return cpu.Coded(
        weight.words,
        weight.scales,
        weight.steps,
        weight.outputs,
        format.block,
        format.per_code,
        format.zero if format.symmetric else 0,
        format.codebook,
    )
