"""Block pool: reference counts, LRU eviction and prefix-cache index of KV-cache blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinfer.ops.attention.kv_cache import BLOCK


def chain_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a prefix that ends with these tokens."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


type OnBlock = Callable[[int, bytes], None]


def ignore(block: int, digest: bytes) -> None:
    """Does nothing with a block."""


@dataclass(frozen=True)
class Content:
    """Content of a block: `tokens` after the prefix with the hash `before`."""

    before: bytes
    tokens: tuple[int, ...]
    digest: bytes | None = None  # of a full block


class BlockPool:
    """The blocks of one group of attentions, with reference counts and the prefix cache's index.

    Attributes:
        count: number of blocks.
        window: sliding window of the group's attentions, the token itself included; None: none.
        on_full, on_evict: called with a block and the hash of the prefix that it ends, when it is
            full, and when it is about to lose its content to another sequence.
    """

    def __init__(self, count: int, window: int | None = None) -> None:
        self.count, self.window = count, window
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._content: list[Content | None] = [None] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, with content; LRU order
        self._full: dict[bytes, int] = {}
        self._after: dict[tuple[bytes, int], dict[int, None]] = {}
        self.on_full: OnBlock = ignore
        self.on_evict: OnBlock = ignore

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
            if (digest := self._evict(block)) is not None:
                self.on_evict(block, digest)
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
        self._content[block] = Content(before, tokens, digest)
        if digest is not None and self._full.setdefault(digest, block) == block:
            self.on_full(block, digest)

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

    def contents(self) -> list[tuple[int, Content]]:
        """Every block that has content, and what it is."""
        return [(block, one) for block, one in enumerate(self._content) if one is not None]

    def content(self, block: int) -> Content | None:
        """The content of a block."""
        return self._content[block]

    def is_idle(self, block: int) -> bool:
        """Whether a block has content and no sequence uses it."""
        return block in self._idle

    def touch(self, block: int) -> None:
        """Makes an unused block the last one to be evicted."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def forget(self, block: int) -> bool:
        """Evicts a block's content, unless a sequence uses it."""
        if block not in self._idle:
            return False
        del self._idle[block]
        self._evict(block)
        self._free.append(block)
        return True

    def _evict(self, block: int) -> bytes | None:
        """Removes a block's content; the hash by which it was found, if it was."""
        content = self._content[block]
        assert content is not None, "idle blocks have content"
        self._content[block] = None
        found: bytes | None = None
        if content.digest is not None and self._full.get(content.digest) == block:
            del self._full[content.digest]
            found = content.digest
        listed = self._after[key := (content.before, content.tokens[0])]
        del listed[block]
        if not listed:
            del self._after[key]
        return found

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
