"""PyTorch's pickled checkpoints, read without running them.

The pickle is interpreted by a machine (pickle_machine.py) that knows a closed list of opcodes and
of names (pickle_values.py); tensors are views of the file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import (
    DTYPES,
    ZIP_MAGIC,
    Checkpoint,
    CheckpointError,
    Tensor,
)
from jinfer.loader.checkpoint.mapped_file import MappedFile
from jinfer.loader.checkpoint.pickle_machine import Machine, run
from jinfer.loader.checkpoint.pickle_values import PickleDict, StridedTensor, read_persistent_id
from jinfer.loader.checkpoint.torch_storage import (
    Storages,
    raw_bytes,
    read_archive,
    read_extent,
    read_legacy,
)

_MAX_WHOLE_RATIO, _MAX_WHOLE_SLACK = 16, 64 << 20  # bytes of all tensors, by those of the file


def open_pickle(path: Path) -> Checkpoint:
    """Open a file of torch.save (.bin, .pt, .pth), a zip archive or older.

    A tensor's `raw` bytes are its values, contiguous and little-endian, however they are stored.

    Raises:
        CheckpointError: a malformed file, or a file that would run code.
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
    archive = read_archive(file)
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


_WRAPPERS = ("state_dict", "model", "module")
_MAX_DEPTH = 16
_MIN_WORK, _MAX_WORK = 10_000, 24_000_000  # a second or two, and 300 MB of names
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StateDict:
    """Tensors, and plain values, by dotted name."""

    tensors: dict[str, StridedTensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


def find_state_dict(path: Path, root: Any, pickle_bytes: int) -> StateDict:
    """Find the state dict in `root`.

    That is `root` itself if it has tensors, or else its item state_dict, model or module that has
    some, or else all of it. Nested names are joined by dots.

    Args:
        path: the file, for messages.
        root: the object in the pickle.
        pickle_bytes: length of the pickle; the number of steps is bounded in proportion to it,
            because values may be shared many times.

    Raises:
        CheckpointError: no tensors, more than one state dict, the same name twice, or containers
            nested too deeply.
    """
    if not isinstance(root, PickleDict):
        kind = "tensor" if isinstance(root, StridedTensor) else type(root).__name__
        reason = f"holds a {kind}, not a dict of tensors; save model.state_dict() instead"
        raise CheckpointError(path, reason)
    walker = _Walker(path, min(_MIN_WORK + 16 * pickle_bytes, _MAX_WORK))
    outer: dict[str, Any] = {}
    for _ in range(_MAX_DEPTH):
        items = dict(walker.items(root))
        outer.update((key, value) for key, value in items.items() if type(value) in _SCALARS)
        inner = walker.find_wrapped(items)
        if inner is None:
            break
        root = inner
    found = walker.collect(root)
    if not found.tensors:
        raise CheckpointError(path, "holds no tensors by name; save model.state_dict() instead")
    return StateDict(found.tensors, outer | found.scalars)


@dataclass
class _Walker:
    """Follows nested dicts and lists, for `work` steps (a step is a character of a name)."""

    path: Path
    work: int

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Items of a dict, a list or a tuple; nothing for anything else."""
        pairs = value.pairs if isinstance(value, PickleDict) else enumerate(value)
        seen: set[str] = set()
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise CheckpointError(self.path, "an OrderedDict has an item that is not a pair")
            key, item = pair
            if type(key) not in (str, int):
                continue  # nothing in a state dict
            name = str(key)
            self.spend(1 + len(name))
            if name in seen:
                raise CheckpointError(self.path, f"a dict has the key {name[:200]!r} twice")
            seen.add(name)
            yield name, item

    def spend(self, steps: int) -> None:
        self.work -= steps
        if self.work < 0:
            reason = "shares or nests containers more than any state dict does"
            raise CheckpointError(self.path, reason)

    def find_wrapped(self, items: dict[str, Any]) -> PickleDict | None:
        """The state dict among the items; None where the items are it."""
        if any(isinstance(value, StridedTensor) for value in items.values()):
            return None
        dicts = {key: items.get(key) for key in _WRAPPERS}
        found = {
            key: value
            for key, value in dicts.items()
            if isinstance(value, PickleDict) and self.collect(value).tensors
        }
        if len(found) > 1:
            reason = f"holds several state dicts ({', '.join(found)}); save one of them"
            raise CheckpointError(self.path, reason)
        return next(iter(found.values()), None)

    def collect(self, value: Any) -> StateDict:
        """Everything below `value`."""
        found = StateDict()
        self._collect(value, "", 0, found)
        return found

    def _collect(self, value: Any, prefix: str, depth: int, found: StateDict) -> None:
        if depth > _MAX_DEPTH:
            reason = f"containers are nested more than {_MAX_DEPTH} deep"
            raise CheckpointError(self.path, reason)
        for key, item in self.items(value):
            name = prefix + key
            self.spend(len(name))
            if isinstance(item, PickleDict | list | tuple):
                self._collect(item, name + ".", depth + 1, found)
            elif isinstance(item, StridedTensor):
                if name in found.tensors:
                    raise CheckpointError(self.path, f"has the tensor {name[:200]!r} twice")
                found.tensors[name] = item
            elif type(item) in _SCALARS:
                found.scalars[name] = item
