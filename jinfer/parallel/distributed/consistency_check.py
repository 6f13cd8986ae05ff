"""Consistency check: all ranks compare specification and checkpoint before loading weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.mapped_file import release
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.open_model import Opened
from jinfer.loader.weights.storage_plan import as_whole_numbers
from jinfer.parallel.distributed.process_group import ProcessGroup

_PLACES, _BYTES = 8, 64  # samples of each tensor, and bytes of each sample
_REMEDY = {
    "specification": "start all processes with the same flags and the same files",
    "checkpoint": "give all processes the same files",
    "processor": (
        "some multiply F16 as whole numbers and some do not: "
        'set quantization.activations = "float" for all processes'
    ),
}


def check_consistency(group: ProcessGroup, opened: Opened) -> None:
    """Compares what this rank has opened with the other ranks.

    Raises:
        SourceError: a rank differs from rank 0.
    """
    local = {
        "specification": _specification(opened),
        "checkpoint": _checkpoint(opened.checkpoint),
        "processor": str(as_whole_numbers(opened.dtype, opened.activations)),
    }
    if reason := _difference(group.gather(local)):
        raise SourceError(reason)


def _difference(every: list[Mapping[str, str]]) -> str:
    """The error for the first rank that differs from rank 0; "": none does."""
    for rank, other in enumerate(every):
        for what, remedy in _REMEDY.items():
            if other[what] != every[0][what]:
                return f"process {rank} has another {what} than process 0; {remedy}"
    return ""


def _specification(opened: Opened) -> str:
    """A hash of all settings that results depend on; paths may differ between hosts."""
    spec = replace(opened.spec, path="")
    settings = (spec, opened.context, opened.dtype, opened.kv_cache, opened.activations)
    return hashlib.sha256(repr(settings).encode()).hexdigest()


def _checkpoint(checkpoint: Checkpoint) -> str:
    """A hash of a checkpoint's tensors: names, shapes, types, and samples of their bytes.

    A few samples of each tensor tell models apart; reading all bytes could take terabytes.
    """
    tensors = checkpoint.tensors
    if isinstance(checkpoint, NativeCheckpoint):
        tensors = checkpoint.parts
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        description = name, tensor.shape, tensor.type, tensor.nbytes
        digest.update(repr(description).encode() + _sample(tensor))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    try:
        raw = tensor.raw()
    except CheckpointError:  # Orbax cannot read single arrays: their names and shapes have to do
        return b""
    starts = (len(raw) * sample // _PLACES for sample in range(_PLACES))
    samples = b"".join(raw[start : start + _BYTES].tobytes() for start in starts)
    release(raw)
    return samples
