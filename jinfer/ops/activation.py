"""Activation functions: SiLU, GELU, ReLU and others, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu import rowwise as cpu
from jinfer.cpu.matmul_call import ACTIVATIONS
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Float

FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log1p": jnp.log1p,
}


def activate(name: str, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Applies a `jinfer.modelspec.blocks.Activation` by its name, in float32."""
    wide = x.astype(jnp.float32)
    if name in ACTIVATIONS and x.ndim and has_cpu_calls():
        y = cpu.activate(wide.reshape(-1, x.shape[-1]), name).reshape(x.shape)
    else:
        y = FUNCTIONS[name](wide)
    return y.astype(x.dtype)


def xielu(
    x: Float[Array, "*rows width"], alpha_p: Float[Array, " 1"], alpha_n: Float[Array, " 1"]
) -> Float[Array, "*rows width"]:
    """xIELU (arXiv 2411.13010) with two learned scalars, in float32."""
    wide = x.astype(jnp.float32)
    shape = (1,) * x.ndim
    above = jax.nn.softplus(alpha_p).reshape(shape) * wide * wide
    below = (0.5 + jax.nn.softplus(alpha_n)).reshape(shape) * (
        jnp.expm1(jnp.minimum(wide, -1e-6)) - wide
    )
    return (jnp.where(wide > 0, above, below) + 0.5 * wide).astype(x.dtype)
