"""torch.save before PyTorch 1.6: five pickles, then the storages one after another.

Source: torch/serialization.py (_legacy_save). The pickles are a magic number, the protocol's
version, facts about the machine, the object, and the list of storage keys; then for each key its
number of elements (int64) and its bytes, little-endian on every machine.
"""

from __future__ import annotations

from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.dtypes import DTYPES
from jinfer.loader.checkpoint.mapped_file import MappedFile
from jinfer.loader.checkpoint.pickle_machine import Machine
from jinfer.loader.checkpoint.pickle_opcodes import run
from jinfer.loader.checkpoint.pickle_values import Storage, read_persistent_id
from jinfer.loader.checkpoint.torch_storage import Extent

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_BYTES = 8
_PROTO = b"\x80"  # how every pickle of protocol 2 and later begins


def read_legacy(file: MappedFile) -> tuple[Any, dict[str, Extent], int]:
    """The object, its storages by key, and the bytes that the pickles take.

    Raises:
        CheckpointError: not this format, a pickle that is refused, storages that are missing or
            do not fill the rest of the file exactly.
    """
    if file.read(0, min(1, file.size)) != _PROTO:
        reason = "is not a PyTorch file: it begins neither as a zip archive nor as a pickle"
        raise CheckpointError(file.path, reason, 0)
    used: dict[str, Storage] = {}

    def load(pid: object) -> Storage:
        storage = read_persistent_id(pid)
        used.setdefault(storage.key, storage)
        return storage

    machine = Machine(file.path, file.view(0, file.size).data, load, file.size)
    magic = run(machine)
    if not isinstance(magic, int) or magic != _MAGIC:
        reason = "is a pickle, but not one of torch.save; save the weights with torch.save"
        raise CheckpointError(file.path, reason, 0)
    version = run(machine)
    if not isinstance(version, int) or version != _PROTOCOL:
        raise CheckpointError(file.path, f"PyTorch file protocol is not {_PROTOCOL}")
    run(machine)  # byte order and C type sizes of the machine that saved it: not used since
    root = run(machine)
    keys = run(machine)
    return root, _find_storages(file, keys, used, machine.position), machine.position


def _find_storages(
    file: MappedFile, keys: Any, used: dict[str, Storage], offset: int
) -> dict[str, Extent]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(file.path, "the list of storage keys is not one", offset)
    extents: dict[str, Extent] = {}
    for key in keys:
        if key not in used or key in extents:
            reason = f"storage {key[:40]!r} is listed twice, or used by no tensor"
            raise CheckpointError(file.path, reason, offset)
        storage = used[key]
        itemsize = DTYPES[storage.type].itemsize if storage.type else 1
        count = int.from_bytes(file.read(offset, _COUNT_BYTES), "little", signed=True)
        if count * itemsize != storage.total:
            reason = f"storage {key[:40]!r} has {count} elements of {itemsize} bytes"
            raise CheckpointError(file.path, f"{reason}, not {storage.total} bytes", offset)
        offset += _COUNT_BYTES
        file.view(offset, storage.total)
        extents[key] = Extent(offset, storage.total, storage.total)
        offset += storage.total
    if offset != file.size:
        raise CheckpointError(file.path, f"{file.size - offset} bytes after the storages", offset)
    return extents
