"""Dense matmul (GEMM and GEMV) with plain weight matrices: chooses the implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import build_library
from jinfer.cpu import matmul_call as cpu
from jinfer.matmul_precision import matmul_precision
from jinfer.ops.backend import backend, has_cpu_calls, has_triton_kernels, interpreted
from jinfer.ops.matmul.quantized import apply_activation, index_stack
from jinfer.quant.scaled_tensor import ScaledTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def reads_16_bit_weights() -> bool:
    """Whether products of float32 rows read 16-bit weights as stored.

    Custom calls do. XLA first converts whole matrices, of all layers at once, so without custom
    calls weights are widened at loading, which takes no more memory.
    """
    return has_cpu_calls()


def f16_as_int_is_faster() -> bool:
    """Whether F16 weights are multiplied faster as integers (`jinfer.quant.f16_as_int`) here.

    With AVX2 alone, integer dot products have higher throughput than float32 FMA. Wider vectors
    keep F16.
    """
    return build_library.isa() == "avx2"


_ALLOW_ROUNDING: ContextVar[bool] = ContextVar("rounded", default=False)


@contextmanager
def allow_bfloat16_rounding(may: bool) -> Iterator[None]:
    """Lets code traced by this thread round activations to bfloat16 where weights are bfloat16.

    It does so on CPUs where bfloat16 dot products have twice the throughput.
    """
    token = _ALLOW_ROUNDING.set(may)
    try:
        yield
    finally:
        _ALLOW_ROUNDING.reset(token)


def allows_bfloat16_rounding() -> bool:
    """Whether `allow_bfloat16_rounding` is in effect."""
    return _ALLOW_ROUNDING.get()


def supports_grouped_dense(
    weight: Float[Array, "experts outputs inputs"] | ScaledTensor, *, transposed: bool = False
) -> bool:
    """Whether `dense_matmul` supports rows sorted by this stack's matrices (grouped matmul)."""
    if backend() != "gpu":
        return reads_16_bit_weights()
    if isinstance(weight, ScaledTensor) or not has_triton_kernels("experts"):
        return False
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.matmul.grouped import takes

    return takes(weight, transposed=transposed)


def dense_matmul(
    x: Float[Array, "*rows inputs"],
    weights: Sequence[Float[Array, "*stack outputs inputs"] | ScaledTensor],
    *,
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
    activation: str = "none",
    transposed: bool = False,
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """Computes x @ weight.T for each weight, in float32.

    The CPU custom call also serves float32 weights, for which it is as fast as XLA or faster.

    Args:
        index: the matrix to use of each stack; the others are not read.
        offsets: grouped matmul: rows offsets[i] .. offsets[i + 1] - 1 use matrix i of a stack; the
            other rows of the result are undefined. Requires `supports_grouped_dense`.
        activation: one of `FUSED_ACTIVATIONS`, or "none": there are two weights, gate and up, and
            one result, activation(x @ gate.T) * (x @ up.T).
        transposed: with offsets: the stacks are [experts, inputs, outputs] instead.
    """
    assert offsets is not None or not transposed, "only stacks"
    if reads_16_bit_weights():
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        which: dict[str, Any] = {"index": index, "offsets": offsets, "activation": activation}
        which["transposed"] = transposed
        stored = [
            cpu.ScaledMatrix(weight.numbers, weight.scales)
            if isinstance(weight, ScaledTensor)
            else weight
            for weight in weights
        ]
        results = cpu.dense_linear(rows, stored, rounded=allows_bfloat16_rounding(), **which)
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)
    if offsets is not None:
        from kernels_pallas.matmul.grouped import grouped_dense_matmul

        product = partial(grouped_dense_matmul, transposed=transposed, interpret=interpreted())
        plain = [weight for weight in weights if not isinstance(weight, ScaledTensor)]
        results = tuple(product(x, offsets, weight) for weight in plain)
        return apply_activation(results, activation)
    if index is not None:
        weights = [index_stack(weight, index) for weight in weights]
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    products = []
    for weight in weights:
        weight = weight.dequantize() if isinstance(weight, ScaledTensor) else weight
        wide = x.dtype if x.dtype == weight.dtype else jnp.float32
        operands = x.astype(wide), weight.astype(wide)
        product = partial(lax.dot_general, precision=matmul_precision(operands[0]))
        products.append(product(*operands, contracted, preferred_element_type=jnp.float32))
    return apply_activation(tuple(products), activation)


def matmul_per_head(
    x: Float[Array, "rows heads inputs"],
    weight: Float[Array, "heads outputs inputs"],
    part: slice,
    *,
    transposed: bool = False,
) -> Float[Array, "rows heads outputs"]:
    """Batched matmul of each head with its own matrix, in float32; batch-invariant.

    Args:
        part: the rows of each matrix to use.
        transposed: these rows are inputs: x @ weight instead of x @ weight.T.
    """
    if not reads_16_bit_weights():
        return jnp.einsum(
            "rhi,hio->rho" if transposed else "rhi,hoi->rho",
            x,
            weight[:, part].astype(x.dtype),
            precision=matmul_precision(x),
            preferred_element_type=jnp.float32,
        )
    rows, heads, inputs = x.shape
    sorted_by_head = x.astype(jnp.float32).swapaxes(0, 1).reshape(heads * rows, inputs)
    offsets = jnp.arange(heads + 1, dtype=jnp.int32) * rows
    options: dict[str, Any] = {"offsets": offsets, "transposed": transposed, "part": part}
    (y,) = cpu.dense_linear(sorted_by_head, [weight], **options)
    return y.reshape(heads, rows, -1).swapaxes(0, 1)
