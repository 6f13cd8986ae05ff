"""PyTorch's pickled checkpoints, read without running them.

The pickle is interpreted by a machine of our own (pickle_machine.py, pickle_opcodes.py) that knows
a closed list of opcodes and of names (pickle_values.py); tensors are views of the file.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint import torch_zip
from jinfer.loader.checkpoint.checkpoint_reader import (
    ZIP_MAGIC,
    Checkpoint,
    CheckpointError,
    Tensor,
)
from jinfer.loader.checkpoint.dtypes import DTYPES
from jinfer.loader.checkpoint.mapped_file import MappedFile
from jinfer.loader.checkpoint.pickle_machine import Machine
from jinfer.loader.checkpoint.pickle_opcodes import run
from jinfer.loader.checkpoint.pickle_values import StridedTensor, read_persistent_id
from jinfer.loader.checkpoint.state_dict import find_state_dict
from jinfer.loader.checkpoint.torch_legacy import read_legacy
from jinfer.loader.checkpoint.torch_storage import Storages, raw_bytes, read_extent

_MAX_WHOLE_RATIO, _MAX_WHOLE_SLACK = 16, 64 << 20  # bytes of all tensors, by those of the file


def open_pickle(path: Path) -> Checkpoint:
    """Opens a file that torch.save made (.bin, .pt, .pth), zip or older.

    A tensor's `raw` bytes are its values, contiguous and little-endian, however they are stored.

    Raises:
        CheckpointError: a malformed file, or one that asks for code to be run.
    """
    file = MappedFile(path)
    if file.read(0, min(4, file.size)) == ZIP_MAGIC:
        root, storages, pickle_bytes = _read_zip(file)
    elif file.size > 262 and file.read(257, 5) == b"ustar":
        reason = "is a tar file of PyTorch before 0.2; load and save it again with PyTorch 1"
        raise CheckpointError(path, reason, 0)
    else:
        root, extents, pickle_bytes = read_legacy(file)
        storages = Storages(file, extents)
    found = find_state_dict(path, root, pickle_bytes)
    tensors = {name: _tensor(storages, name, view) for name, view in found.tensors.items()}
    _check_whole(file, tensors)
    return Checkpoint(path, "pickle", tensors, found.scalars)


def _check_whole(file: MappedFile, tensors: dict[str, Tensor]) -> None:
    """Tensors may share storages and repeat elements; read, they take their own size each."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    if whole > _MAX_WHOLE_RATIO * file.size + _MAX_WHOLE_SLACK:
        reason = f"its {len(tensors)} tensors have {whole} bytes in a file of {file.size}"
        raise CheckpointError(file.path, f"{reason}; save contiguous tensors")


def _read_zip(file: MappedFile) -> tuple[Any, Storages, int]:
    archive = torch_zip.read_archive(file)
    data = read_extent(file, archive.pickle).data
    base = archive.pickle.offset if archive.pickle.crc is None else None
    root = run(Machine(file.path, data, read_persistent_id, file.size, base))
    return root, Storages(file, archive.storages, archive.big_endian), len(data)


def _tensor(storages: Storages, name: str, view: StridedTensor) -> Tensor:
    count = storages.check(name, view)
    read = functools.partial(storages.read, view)

    def raw() -> np.ndarray:
        return raw_bytes(read())

    nbytes = count * DTYPES[view.type].itemsize
    return Tensor(name, view.shape, view.type, nbytes, read, raw)
