"""Tensors by name in float64, and the two layers that nearly every model writes with them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .numpy_blocks import layer_norm, linear

type Floats = NDArray[np.float64]
type Tensors = Mapping[str, Floats]

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_safetensors(folder: Path) -> dict[str, Floats]:
    """All tensors of all safetensors files in a folder."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header: dict[str, dict] = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            values = np.frombuffer(content[start + first : start + last], DTYPES[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
    return tensors


def within(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names start with the prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


def layers_of(tensors: Tensors, prefix: str = "model.layers.") -> Iterator[Tensors]:
    """Each layer's tensors, by the rest of their names."""
    count = 1 + max(int(name.split(".")[0]) for name in within(tensors, prefix))
    return (within(tensors, f"{prefix}{i}.") for i in range(count))


def dense(x: Floats, tensors: Tensors, name: str) -> Floats:
    """Linear layer `name`, with a bias if there is one."""
    return linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def centre(x: Floats, tensors: Tensors, name: str, eps: float = 1e-5) -> Floats:
    """Layer norm `name`."""
    return layer_norm(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)


def heads(x: Floats, count: int) -> Floats:
    """[length, count dim] -> [length, count, dim]."""
    return x.reshape(len(x), count, -1)


def merged(x: ArrayLike) -> Floats:
    """[length, heads, dim] -> [length, heads dim]."""
    array = np.asarray(x)
    return array.reshape(len(array), -1)
