"""Norms as one custom call."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from jinfer.cpu import build


def available() -> bool:
    """Whether the custom call exists on this machine; compiles it the first time."""
    return build.register("jinfer_rms_norm")


def rms_norm(
    x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float, offset: float
) -> Float[Array, "*rows size"]:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), all float32."""
    call = jax.ffi.ffi_call("jinfer_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, eps=np.float32(eps), offset=np.float32(offset))
