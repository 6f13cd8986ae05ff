"""Estimated time of reading and quantizing weights, which progress bars count by."""

from __future__ import annotations

from jinfer.quant.quantize_matrix import Method
from jinfer.weights.storage_plan import Storage

# Seconds of a core for each byte that is read, for each weight that is quantized, and, with error
# GPTQ, for each weight and token that is read: once to write it, twice to learn from it.
PER_BYTE, PER_PRODUCT, PASSES = 1e-9, 1.6e-10, 3
PER_WEIGHT: dict[Method, float] = {"rtn": 1e-8, "mse": 6e-8, "gptq": 4e-7}


def per_weight(storage: Storage | None) -> float:
    """Seconds of a core for each weight that is stored so.

    Args:
        storage: None: it is not quantized.
    """
    return 0.0 if storage is None or storage.as_in_file else PER_WEIGHT[storage.method]
