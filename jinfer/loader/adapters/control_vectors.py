"""Control vectors: steering vectors in a GGUF file, a direction for each layer (llama.cpp).

`direction.N` [hidden] is added to the residual stream after layer N; llama.cpp counts layers from
0 here, and has no direction for layer 0. Its loader reads nothing else of the file.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.sampling.activation_edits import Range, Steer

_ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.(\d{1,4})")
_MAX_LAYERS = 1024  # layers


def read_control_vector(
    path: str | Path,
    scale: float = 1.0,
    *,
    layers: tuple[int, int] | None = None,
    tokens: Range | slice = "all",
) -> list[Steer]:
    """Read the steering vectors of a control vector, a vector for each layer.

    Args:
        path: a GGUF file.
        scale: a factor (llama.cpp: --control-vector-scaled).
        layers: the first and the last layer to steer; None: all layers of the file
            (llama.cpp: --control-vector-layer-range).
        tokens: the tokens to steer, see `Edit`.

    Raises:
        CheckpointError: the file is damaged, or no control vector.
    """
    path = Path(path)
    checkpoint = open_gguf(path)
    architecture = checkpoint.metadata.get("general.architecture", _ARCHITECTURE)
    if architecture != _ARCHITECTURE:
        reason = f"is no control vector: general.architecture is {architecture!r:.60}"
        raise CheckpointError(path, f"{reason}, not {_ARCHITECTURE!r}")
    found = dict[int, np.ndarray]()
    for name, tensor in checkpoint.tensors.items():
        match = _NAME.fullmatch(name)
        number = 0 if match is None else int(match[1])
        if not 1 <= number < _MAX_LAYERS:
            reason = f"{name:.100} is no direction of a layer; they are direction.1 and so on"
            raise CheckpointError(path, reason)
        if tensor.type != "F32" or len(tensor.shape) != 1 or not tensor.shape[0]:
            shape = f"{tensor.type} {list(tensor.shape)}"
            raise CheckpointError(path, f"{name} is {shape}, not a vector of F32")
        found[number] = np.asarray(tensor.read(), np.float32)
        if not np.isfinite(found[number]).all():
            raise CheckpointError(path, f"{name} has numbers that are not finite")
    widths = sorted({len(vector) for vector in found.values()})
    if len(widths) != 1:
        reason = f"its directions have widths {widths}" if widths else "has no direction.N"
        raise CheckpointError(path, f"{reason}: it is no control vector")
    first, last = (1, _MAX_LAYERS) if layers is None else layers
    return [
        Steer(f"decoder.{number}.x", vector, scale, tokens)
        for number, vector in sorted(found.items())
        if first <= number <= last
    ]
