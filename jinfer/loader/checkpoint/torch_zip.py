"""torch.save since PyTorch 1.6, zip archives: checked, then read in place.

Source: PKWARE's APPNOTE, and torch/serialization.py: one top folder with data.pkl, version,
byteorder, and data/<key> for each storage, stored uncompressed and aligned to 64 bytes. Every
entry is checked: its local header agrees with the directory, it lies inside the file, no two
overlap. The checksums of stored entries are not compared: that would read the whole file.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass

from jinfer.loader.checkpoint.checkpoint_reader import ZIP_MAGIC, CheckpointError
from jinfer.loader.checkpoint.mapped_file import MappedFile
from jinfer.loader.checkpoint.pickle_machine import MAX_PICKLE_BYTES
from jinfer.loader.checkpoint.torch_storage import Extent, read_extent

_LOCAL = struct.Struct("<4s5H3I2H")
_IN_ZIP64 = 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1 << 0, 1 << 3, 1 << 11
# deflate shrinks zeros a thousandfold; pickles of weights by much less, and weights hardly at all
_MAX_RATIO = 100
_MAX_WHOLE_RATIO, _MAX_WHOLE_SLACK = 16, 64 << 20  # of everything that is compressed, together
_MAX_SMALL = 64  # bytes of the entries that hold a word


@dataclass(frozen=True)
class Archive:
    """A checked archive: the pickle, and the storages by key."""

    pickle: Extent
    storages: dict[str, Extent]
    big_endian: bool


def read_archive(file: MappedFile) -> Archive:
    """Checks a zip archive and finds its parts.

    Raises:
        CheckpointError: a damaged archive, or one that torch.save did not make.
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
    inflated = sum(each.size for each in storages.values() if each.crc is not None)
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


def _check_size(file: MappedFile, extent: Extent, most: int, what: str) -> None:
    """Before it is inflated."""
    if extent.crc is not None and extent.size > most:
        reason = f"{what[:200]} inflates to {extent.size} bytes; at most {most} are read"
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
    # what zipfile is known to raise on damaged archives, ValueError and OSError among them for
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
