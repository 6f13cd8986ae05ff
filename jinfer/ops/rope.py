"""RoPE: rotary position embedding of queries and keys (arXiv 2104.09864)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import fuses_prologue, has_cpu_calls
from jinfer.ops.reductions import rounded

if TYPE_CHECKING:
    from jaxtyping import Float

ROTATE = Primitive("rotate")  # on a GPU, for `jinfer.ops.fusion.fuse_gpu` to find


def rotate(
    x: Float[Array, "*tokens width"],
    cos: Float[Array, "*tokens pairs"],
    sin: Float[Array, "*tokens pairs"],
    *,
    size: int,
    adjacent: bool,
) -> Float[Array, "*tokens width"]:
    """Rotates pairs of numbers in each head, in float32.

    Args:
        x: concatenated heads.
        size: head size; the first 2 * pairs numbers of a head are rotated, the others are
            unchanged.
        adjacent: the numbers of a pair are neighbours (GPT-J style); otherwise they are `pairs`
            apart (GPT-NeoX style).
    """
    if fuses_prologue():
        return ROTATE.bind(x, cos, sin, size=size, adjacent=adjacent)
    if not has_cpu_calls():
        return rotate_reference(x, cos, sin, size=size, adjacent=adjacent)
    flat, *angles = (part.reshape(-1, part.shape[-1]) for part in (x, cos, sin))
    y = cpu.rotate(flat.astype(jnp.float32), *angles, size=size, adjacent=adjacent)
    return y.astype(x.dtype).reshape(x.shape)


def rotate_reference(x: Array, cos: Array, sin: Array, *, size: int, adjacent: bool) -> Array:
    """Computes `rotate` in XLA operations."""
    heads, dim = x.reshape(*x.shape[:-1], -1, size), 2 * cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned, rest = heads[..., :dim].astype(jnp.float32), heads[..., dim:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if adjacent else jnp.split(turned, 2, axis=-1)
    first = rounded(a * cos) - rounded(b * sin)
    second = rounded(b * cos) + rounded(a * sin)
    if adjacent:
        turned = jnp.stack([first, second], axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate([first, second], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1).reshape(x.shape)


@ROTATE.def_abstract_eval
def _shape(x: Any, cos: Any, sin: Any, **_: Any) -> Any:
    del cos, sin
    return x


ROTATE.def_impl(partial(jax.jit, static_argnames=("size", "adjacent"))(rotate_reference))
mlir.register_lowering(ROTATE, mlir.lower_fun(rotate_reference, multiple_results=False))
