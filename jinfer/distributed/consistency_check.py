"""Whether all processes serve the same: compared before any weight is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from jinfer.checkpoint import Checkpoint, CheckpointError, Tensor
from jinfer.checkpoint.mapped_file import release
from jinfer.checkpoint.native_checkpoint import ConvertedCheckpoint
from jinfer.distributed.process_group import Group
from jinfer.opening.open_model import Opened
from jinfer.opening.sources import SourceError
from jinfer.weights.plan_weights import as_whole_numbers

_PLACES, _BYTES = 8, 64  # of a tensor that are looked at, and how much at each
_REMEDY = {
    "specification": "start all processes with the same flags and the same files",
    "checkpoint": "give all processes the same files",
    "processor": (
        "some multiply F16 as whole numbers and some do not: "
        'set quantization.activations = "float" for all processes'
    ),
}


def agree(group: Group, opened: Opened) -> None:
    """Compares what this process has opened with what the others have.

    Raises:
        SourceError: a process has something else than process 0.
    """
    own = {
        "specification": _specification(opened),
        "checkpoint": _checkpoint(opened.checkpoint),
        "processor": str(as_whole_numbers(opened.dtype, opened.activations)),
    }
    every = group.gathered(own)
    reason = group.shared(_difference(every))
    if reason:
        raise SourceError(reason)


def _difference(every: list[Mapping[str, str]]) -> str:
    """What the first process that differs from process 0 says; "": none does."""
    for rank, other in enumerate(every):
        for what, remedy in _REMEDY.items():
            if other[what] != every[0][what]:
                return f"process {rank} has another {what} than process 0; {remedy}"
    return ""


def _specification(opened: Opened) -> str:
    """Changes with all that a process computes by; where files lie is each one's own affair."""
    spec = replace(opened.spec, path="")
    known = (spec, opened.context, opened.dtype, opened.kv_cache, opened.activations)
    return _hashed(repr(known).encode())


def _checkpoint(checkpoint: Checkpoint) -> str:
    """Changes with a checkpoint's tensors, and what is looked at of their bytes.

    All of them would be terabytes for some: a few places of each tensor tell models apart.
    """
    tensors = checkpoint.tensors
    if isinstance(checkpoint, ConvertedCheckpoint):
        tensors = checkpoint.parts
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        known = name, tensor.shape, tensor.type, tensor.nbytes
        digest.update(repr(known).encode() + _sample(tensor))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    try:
        raw = tensor.raw()
    except CheckpointError:  # Orbax reads no array alone; its list of them has to do
        return b""
    starts = (len(raw) * place // _PLACES for place in range(_PLACES))
    found = b"".join(raw[start : start + _BYTES].tobytes() for start in starts)
    release(raw)
    return found


def _hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
