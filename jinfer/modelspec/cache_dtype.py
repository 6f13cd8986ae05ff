"""KV cache dtype: plain floats, or quantized codes of a width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jinfer.modelspec.quant_format import FORMATS, QuantFormat

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Storage type of cached keys and values.
type Kind = DTypeLike | QuantFormat

FLOAT_DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def parse_cache_dtype(name: str) -> Kind:
    """Parses "f32", "bf16", "f16" or a width: "q8", "q6", "q5", "q4", "q3.5", "q3", "q2".

    Raises:
        ValueError: there is no such type.
    """
    kind = FLOAT_DTYPES.get(name) or FORMATS.get(name)
    if kind is None:
        known = ", ".join([*FLOAT_DTYPES, *FORMATS])
        raise ValueError(f"no kind of cache {name!r}; there are {known}")
    return kind
