"""Arrays of JAX that nothing is compiled for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def on_device(values: Any, dtype: Any = None) -> Array:
    """What `jnp.asarray` gives, which compiles a program for each new shape and type of NumPy's.

    A copy: `device_put` may take the memory that it is given, and a test may write to it later,
    while a program still reads it.
    """
    if isinstance(values, Array):
        return jnp.asarray(values, dtype)
    return jax.device_put(np.array(values, dtype))
