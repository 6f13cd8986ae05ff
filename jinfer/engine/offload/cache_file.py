"""Cache file: blocks of the prefix cache in one file, each with a checksum.

Two lines name the format and the identity of model and machine. Records follow: a length, JSON of
that length, the block's bytes, and SHA-256 of everything that the block depends on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jinfer.disk_cache import whole_file

_FIRST = b"jinfer KV cache 1\n"
_LENGTH = 4  # bytes of a record's length
_MAX_HEAD = 1 << 16  # bytes of a record's JSON, which has 64 token ids
_HASH = hashlib.sha256().digest_size


class CacheFileError(ValueError):
    """A file that cannot be loaded; the message is the reason, without the path."""


class SavedBlock(NamedTuple):
    """A block of a cache file.

    Attributes:
        group: its cache group.
        before: hash of the prefix before its tokens.
        tokens: the block's tokens; of a recurrent state, the tokens after the last whole block.
        content: its bytes.
    """

    group: str
    before: bytes
    tokens: tuple[int, ...]
    content: bytes


def write_cache_file(path: Path, identity: str, blocks: Iterable[SavedBlock]) -> int:
    """Write a file, which gets its name when it is complete; return its size in bytes.

    Args:
        identity: result of `cache_identity`.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write(_FIRST + identity.encode() + b"\n")
        for block in blocks:
            head = json.dumps(
                {
                    "group": block.group,
                    "before": block.before.hex(),
                    "tokens": block.tokens,
                    "nbytes": len(block.content),
                }
            ).encode()
            file.write(len(head).to_bytes(_LENGTH, "little") + head)
            file.write(block.content)
            file.write(_checksum(identity, head, block.content))
        return file.tell()


def read_cache_file(path: Path, identity: str, sizes: Mapping[str, int]) -> Iterator[SavedBlock]:
    """Read the blocks of a file, up to the first damaged one.

    Args:
        identity: result of `cache_identity`.
        sizes: bytes of a block of each group.

    Raises:
        CacheFileError: it is no cache file, or a file of another model.
        OSError: it cannot be read.
    """
    # A pipe would block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if file.readline(_MAX_HEAD) != _FIRST:
            raise CacheFileError("is no saved cache")
        if file.readline(_MAX_HEAD).strip() != identity.encode():
            raise CacheFileError(
                "was saved with another model, other settings, another version or machine; compute "
                "its prompts again"
            )
        while (block := _record(file, identity, sizes)) is not None:
            yield block


def _record(file: BinaryIO, identity: str, sizes: Mapping[str, int]) -> SavedBlock | None:
    """The next record; None at the end, or where it is damaged."""
    length = int.from_bytes(file.read(_LENGTH), "little")
    if not 0 < length <= _MAX_HEAD:
        return None
    head = file.read(length)
    try:
        values = json.loads(head)
        group, tokens = str(values["group"]), tuple(map(int, values["tokens"]))
        before = bytes.fromhex(values["before"])
    except (ValueError, KeyError, TypeError):
        return None
    if values.get("nbytes") != sizes.get(group):
        return None
    content = file.read(sizes[group])
    if not hmac.compare_digest(file.read(_HASH), _checksum(identity, head, content)):
        return None
    return SavedBlock(group, before, tokens, content)


def _checksum(identity: str, head: bytes, content: bytes) -> bytes:
    digest = hashlib.sha256(identity.encode() + b"\n" + head + b"\n")
    digest.update(content)
    return digest.digest()
