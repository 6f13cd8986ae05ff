"""Block pool: reference counts, LRU eviction and prefix-cache index of KV-cache blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jinfer.ops.attention.kv_cache import BLOCK


def chain_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a prefix that ends with these tokens."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class _Content:
    """Content of a block: `tokens` after the prefix with the hash `before`."""

    before: bytes
    tokens: tuple[int, ...]
    digest: bytes | None = None  # of a full block


class BlockPool:
    """The blocks of one group of attentions, with reference counts and the prefix cache's index.

    Attributes:
        count: number of blocks.
        window: sliding window of the group's attentions, the token itself included; None: none.
    """

    def __init__(self, count: int, window: int | None = None) -> None:
        self.count, self.window = count, window
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._content: list[_Content | None] = [None] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, with content; LRU order
        self._full: dict[bytes, int] = {}
        self._after: dict[tuple[bytes, int], dict[int, None]] = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.count - self.available

    def allocate(self) -> int | None:
        """An unshared block; None if all are in use."""
        if not self.available:
            return None
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
        self._references[block] = 1
        return block

    def add_reference(self, block: int) -> None:
        """One more sequence uses the block."""
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One sequence less uses the block; unused, its content stays until it is evicted."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._content[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def register(self, block: int, before: bytes, tokens: tuple[int, ...]) -> None:
        """Enters a block's content into the prefix cache; called again as the block fills up."""
        old = self._content[block]
        if old is None:
            self._after.setdefault((before, tokens[0]), {})[block] = None
        digest = chain_hash(before, tokens) if len(tokens) == BLOCK else None
        self._content[block] = _Content(before, tokens, digest)
        if digest is not None:
            self._full.setdefault(digest, block)

    def lookup(self, digest: bytes) -> int | None:
        """The full block that ends the prefix with this hash."""
        return self._full.get(digest)

    def lookup_partial(self, before: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(common tokens, block) of the block that has most of the tokens after a prefix."""
        best = (0, -1)
        for block in self._after.get((before, tokens[0]), ()) if tokens else ():
            content = self._content[block]
            assert content is not None, "only registered blocks are listed"
            best = max(best, (common_prefix_length(content.tokens, tokens), block))
        return best

    def _evict(self, block: int) -> None:
        content = self._content[block]
        assert content is not None, "idle blocks have content"
        self._content[block] = None
        if content.digest is not None and self._full.get(content.digest) == block:
            del self._full[content.digest]
        listed = self._after[key := (content.before, content.tokens[0])]
        del listed[block]
        if not listed:
            del self._after[key]

    def clear(self) -> None:
        """Evicts the content of all unused blocks, as when the cache's memory is lost."""
        while self._idle:
            block, _ = self._idle.popitem()
            self._evict(block)
            self._free.append(block)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
