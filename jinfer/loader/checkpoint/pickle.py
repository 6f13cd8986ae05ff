"""PyTorch's pickled checkpoints, read without running them.

The pickle is interpreted by a machine (pickle_machine.py) that knows a closed list of opcodes and
of names (pickle_values.py). Tensors are strided views of storages, bytes outside the pickle: in a
zip archive, or after the pickles of an older file.
"""

from __future__ import annotations

import functools
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
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
    is_bool,
)
from jinfer.loader.checkpoint.mapped_file import MappedFile, as_array, element_count
from jinfer.loader.checkpoint.pickle_machine import MAX_PICKLE_BYTES, Machine, run
from jinfer.loader.checkpoint.pickle_values import (
    PickleDict,
    Storage,
    StridedTensor,
    read_persistent_id,
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


# a view may repeat elements (stride 0); read, it may be as large as its storage or file, or this
_MAX_REPEATED_BYTES = 16 << 20


@dataclass(frozen=True)
class Extent:
    """A range of a file: `stored` bytes from `offset`, which inflate to `size` bytes.

    Attributes:
        crc: CRC-32 of the inflated bytes; None for bytes that are not compressed.
    """

    offset: int
    stored: int
    size: int
    crc: int | None = None


def read_extent(file: MappedFile, extent: Extent) -> np.ndarray:
    """The bytes of an extent, uint8 [size]: a view of the map, or inflated.

    Raises:
        CheckpointError: compressed bytes that are damaged or do not have the size they claim.
    """
    stored = file.view(extent.offset, extent.stored)
    if extent.crc is None:
        return stored
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # a byte more than claimed, so that an excess is noticed without inflating it
        data = inflater.decompress(stored.data, extent.size + 1)
    except zlib.error as error:
        raise CheckpointError(
            file.path, f"compressed bytes are damaged: {error}", extent.offset
        ) from None
    if len(data) != extent.size or not inflater.eof or zlib.crc32(data) != extent.crc:
        reason = "compressed bytes do not have the size or checksum they claim"
        raise CheckpointError(file.path, reason, extent.offset)
    return np.frombuffer(data, np.uint8)


@dataclass
class Storages:
    """All storages of a file, by key.

    The storage that was inflated last is kept, because tensors that share it are read in
    succession.
    """

    file: MappedFile
    extents: Mapping[str, Extent]
    big_endian: bool = False
    _last: tuple[str, np.ndarray] | None = field(default=None, init=False, repr=False)

    def check(self, name: str, tensor: StridedTensor) -> int:
        """Elements of `tensor`, once it is certain that it can be read.

        Raises:
            CheckpointError: a storage that is missing or has another size, a view that reaches
                outside it or is too large.
        """

        def fail(reason: str) -> CheckpointError:
            where = extent.offset if extent else None
            return CheckpointError(self.file.path, f"tensor {name[:200]!r}: {reason}", where)

        storage = tensor.storage
        extent = self.extents.get(storage.key)
        if extent is None:
            raise fail(f"its storage {storage.key[:40]!r} is missing")
        if extent.size != storage.total:
            raise fail(f"its storage has {extent.size} bytes, {storage.total} are expected")
        if tensor.type != (storage.type or tensor.type):
            raise fail(f"is {tensor.type} over a storage of {storage.type}")
        itemsize = DTYPES[tensor.type].itemsize
        count = element_count(tensor.shape, itemsize)
        if count is None:
            raise fail("shape is too large")
        end = tensor.offset + _reach(tensor)
        if count and end * itemsize > storage.size:
            raise fail(f"reaches element {end} of a storage of {storage.size // itemsize}")
        if count * itemsize > max(storage.size, self.file.size, _MAX_REPEATED_BYTES):
            raise fail("repeats its elements more often than is read; save a contiguous tensor")
        return count

    def read(self, tensor: StridedTensor) -> np.ndarray:
        """Values of a tensor that `check` let pass: a read-only view where that is possible.

        Raises:
            CheckpointError: compressed bytes that are damaged, booleans that are neither 0 nor 1.
        """
        dtype, storage = DTYPES[tensor.type], tensor.storage
        count = math.prod(tensor.shape)
        used = _reach(tensor) * dtype.itemsize if count else 0
        start = storage.offset + tensor.offset * dtype.itemsize if count else 0
        raw = self._bytes(storage.key)[start : start + used]
        if tensor.type == "BOOL" and not is_bool(raw):
            reason = f"storage {storage.key!r}: a bool is neither 0 nor 1"
            raise CheckpointError(self.file.path, reason, self.extents[storage.key].offset)
        if self.big_endian:
            raw = _swapped(raw, dtype)
        if _is_contiguous(tensor):
            return as_array(raw, dtype, tensor.shape)
        aligned = as_array(raw, dtype, (used // dtype.itemsize,)).view(np.uint8)
        # a dimension of 1 may have any stride, even one that does not fit the machine's integers
        pairs = zip(tensor.shape, tensor.strides, strict=True)
        strides = [step * dtype.itemsize if size > 1 else 0 for size, step in pairs]
        # not as_strided, which asks NumPy for each type by name: ml_dtypes' float8_e5m2 has none
        return np.ndarray(tensor.shape, dtype, aligned.data, 0, strides)

    def _bytes(self, key: str) -> np.ndarray:
        extent, last = self.extents[key], self._last
        if extent.crc is None:
            return read_extent(self.file, extent)
        # one assignment, so that threads that read together see the whole pair or the old one
        if last is None or last[0] != key:
            last = self._last = (key, read_extent(self.file, extent))
        return last[1]


def raw_bytes(values: np.ndarray) -> np.ndarray:
    """Values as contiguous little-endian bytes, uint8 [nbytes]: a view where that is possible."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    raw.flags.writeable = False
    return raw


def _reach(tensor: StridedTensor) -> int:
    """Elements from the first to the last of the view, for a tensor with elements."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


def _is_contiguous(tensor: StridedTensor) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size == 0:
            return True
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _swapped(raw: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Bytes of big-endian elements in little-endian order; a complex number is two floats."""
    unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return raw.reshape(-1, unit)[:, ::-1].reshape(-1)


_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_BYTES = 8
_PROTO = b"\x80"  # the first byte of pickles of protocol 2 and later


def read_legacy(file: MappedFile) -> tuple[Any, dict[str, Extent], int]:
    """Read a file of torch.save before PyTorch 1.6: five pickles, then the storages.

    Source: torch/serialization.py (_legacy_save). The pickles are a magic number, the version of
    the protocol, facts about the machine, the object, and the list of storage keys; then follow,
    for each key, its number of elements (int64) and its bytes, always little-endian.

    Returns:
        The object, its storages by key, and the size of the pickles.

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


_LOCAL = struct.Struct("<4s5H3I2H")
_IN_ZIP64 = 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1 << 0, 1 << 3, 1 << 11
# deflate shrinks zeros a thousandfold; pickles of weights by much less, and weights hardly at all
_MAX_RATIO = 100
_MAX_SMALL = 64  # bytes of the entries that hold a word


@dataclass(frozen=True)
class Archive:
    """A checked archive: the pickle, and the storages by key."""

    pickle: Extent
    storages: dict[str, Extent]
    big_endian: bool


def read_archive(file: MappedFile) -> Archive:
    """Check a zip archive of torch.save (since PyTorch 1.6) and find its parts.

    Source: PKWARE's APPNOTE, and torch/serialization.py: a top folder with data.pkl, version,
    byteorder, and data/<key> for each storage, stored uncompressed and aligned to 64 bytes. Every
    entry is checked: its local header agrees with the directory, it is inside the file, and no two
    overlap. The checksums of stored entries are not compared: that would read the whole file.

    Raises:
        CheckpointError: a damaged archive, or an archive of another program.
    """
    entries = _read_entries(file)
    pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        reason = f"zip archive has {len(pickles)} <name>/data.pkl, a PyTorch file has one"
        raise CheckpointError(file.path, reason)
    folder = pickles[0].removesuffix("data.pkl")
    if folder + "constants.pkl" in entries:
        reason = "is a TorchScript program; save model.state_dict() with torch.save instead"
        raise CheckpointError(file.path, reason)
    order = _read_word(file, entries.get(folder + "byteorder")) or b"little"
    if order not in (b"little", b"big"):
        raise CheckpointError(file.path, f"byte order is {order!r}, not little or big")
    start = folder + "data/"
    storages = {name[len(start) :]: e for name, e in entries.items() if name.startswith(start)}
    inflated = sum(extent.size for extent in storages.values() if extent.crc is not None)
    if inflated > _MAX_WHOLE_RATIO * file.size + _MAX_WHOLE_SLACK:
        reason = f"its storages inflate to {inflated} bytes; save it again with torch.save"
        raise CheckpointError(file.path, reason)
    _check_size(file, entries[pickles[0]], MAX_PICKLE_BYTES, pickles[0])
    return Archive(entries[pickles[0]], storages, order == b"big")


def _read_word(file: MappedFile, extent: Extent | None) -> bytes:
    if extent is None:
        return b""
    _check_size(file, extent, _MAX_SMALL, "byteorder")
    return read_extent(file, extent).tobytes().strip()


def _check_size(file: MappedFile, extent: Extent, limit: int, what: str) -> None:
    """Before it is inflated."""
    if extent.crc is not None and extent.size > limit:
        reason = f"{what[:200]} inflates to {extent.size} bytes; at most {limit} are read"
        raise CheckpointError(file.path, reason, extent.offset)


def _read_entries(file: MappedFile) -> dict[str, Extent]:
    infos, directory = _read_directory(file)
    entries: dict[str, Extent] = {}
    previous_end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = info.orig_filename
        if name in entries:
            raise CheckpointError(file.path, f"zip archive has {name[:200]!r} twice")
        if info.header_offset < 0:
            raise CheckpointError(file.path, "zip directory is damaged: a negative offset")
        if info.header_offset < previous_end:
            reason = f"zip entry {name[:200]!r} overlaps the one before it"
            raise CheckpointError(file.path, reason, info.header_offset)
        entries[name] = _check_entry(file, info)
        previous_end = entries[name].offset + entries[name].stored
    if previous_end > directory:
        raise CheckpointError(file.path, "zip entries overlap the directory", directory)
    return entries


def _read_directory(file: MappedFile) -> tuple[list[zipfile.ZipInfo], int]:
    """The central directory, as the standard library reads it, and where it starts."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            return archive.infolist(), archive.start_dir
    # zipfile raises these on damaged archives, among them ValueError and OSError for
    # negative offsets
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        OSError,
        OverflowError,
        ValueError,
        struct.error,
    ) as error:
        reason = f"zip directory is damaged, or the file is cut short: {error}"
        raise CheckpointError(file.path, reason[:300]) from None


def _check_entry(file: MappedFile, info: zipfile.ZipInfo) -> Extent:
    name, at = info.orig_filename, info.header_offset

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(file.path, f"zip entry {name[:200]!r}: {reason}", at)

    if info.flag_bits & _ENCRYPTED:
        raise fail("is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise fail(
            f"has compression method {info.compress_type}; only stored and deflated are read"
        )
    local = _LOCAL.unpack(file.read(at, _LOCAL.size))
    magic, flags, method, sizes, lengths = local[0], local[2], local[3], local[7:9], local[9:11]
    encoding = "utf-8" if flags & _UTF8 else "cp437"
    local_name = file.read(at + _LOCAL.size, lengths[0]).decode(encoding, "replace")
    if magic != ZIP_MAGIC or method != info.compress_type or local_name != name:
        raise fail("its local header does not agree with the directory")
    for size, listed in zip(sizes, (info.compress_size, info.file_size), strict=True):
        if size not in (listed, _IN_ZIP64) and not (flags & _SIZES_FOLLOW and size == 0):
            raise fail(f"its local header says {size} bytes, the directory {listed}")
    start = at + _LOCAL.size + sum(lengths)
    file.view(start, info.compress_size)
    if info.compress_type == zipfile.ZIP_STORED:
        if info.file_size != info.compress_size:
            raise fail("is stored, but has two sizes")
        return Extent(start, info.compress_size, info.file_size)
    if info.file_size > _MAX_RATIO * info.compress_size + zlib.DEF_BUF_SIZE:
        raise fail(f"inflates more than {_MAX_RATIO}-fold; save it again with torch.save")
    return Extent(start, info.compress_size, info.file_size, info.CRC)
