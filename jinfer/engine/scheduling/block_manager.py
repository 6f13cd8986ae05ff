"""Blocks of a paged cache: who holds which, and what each holds, so that it can be shared.

A block keeps `BLOCK` tokens of one sequence for all attentions of a group. Its content is known by
the tokens in it and by a digest of all tokens before it; a sequence that begins with the same
tokens holds the same block instead of computing it again. Nobody writes into a block that others
hold: full blocks never change, and of a block that fits in part a copy is made. Blocks that nobody
holds keep their content until they are needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jinfer.ops.attention.kv_cache import BLOCK

GIVEN_BACK = -1  # stands in a table for a block that a window has left behind
WORTH_A_COPY = 8  # tokens; fewer are computed sooner than a block is copied
_WHOLE = (0,) * BLOCK  # stands for the content of an encoder's block, which its key says whole


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a beginning that ends with these tokens."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class _Content:
    """What a block holds: `tokens` after the beginning with the digest `before`."""

    before: bytes
    tokens: tuple[int, ...]
    digest: bytes | None = None  # once it is full


class BlockPool:
    """The blocks of one group of attentions.

    Attributes:
        count: of blocks.
        window: tokens that the group's attentions look back, themselves included; None: all.
    """

    def __init__(self, count: int, window: int | None = None) -> None:
        self.count, self.window = count, window
        self._free = list(range(count - 1, -1, -1))
        self._held = [0] * count
        self._content: list[_Content | None] = [None] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # not held, with content, oldest first
        self._full: dict[bytes, int] = {}
        self._after: dict[tuple[bytes, int], dict[int, None]] = {}

    @property
    def available(self) -> int:
        """Blocks that can be had."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.available

    def take(self) -> int | None:
        """A block of one's own; None where all are held."""
        if not self.available:
            return None
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._held[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder."""
        self._idle.pop(block, None)
        self._held[block] += 1

    def give_back(self, block: int) -> None:
        """One holder less."""
        self._held[block] -= 1
        if self._held[block]:
            return
        if self._content[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def describe(self, block: int, before: bytes, tokens: tuple[int, ...]) -> None:
        """Notes what a held block has, so that others can find it; called again as it fills."""
        old = self._content[block]
        if old is None:
            self._after.setdefault((before, tokens[0]), {})[block] = None
        digest = chain(before, tokens) if len(tokens) == BLOCK else None
        self._content[block] = _Content(before, tokens, digest)
        if digest is not None:
            self._full.setdefault(digest, block)

    def find(self, digest: bytes) -> int | None:
        """The full block that ends the beginning with this digest."""
        return self._full.get(digest)

    def find_part(self, before: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(tokens in common, block) of the block that holds most of what follows a beginning."""
        best = (0, -1)
        for block in self._after.get((before, tokens[0]), ()) if tokens else ():
            content = self._content[block]
            assert content is not None, "only described blocks are listed"
            best = max(best, (common(content.tokens, tokens), block))
        return best

    def _forget(self, block: int) -> None:
        content = self._content[block]
        assert content is not None, "idle blocks have content"
        self._content[block] = None
        if content.digest is not None and self._full.get(content.digest) == block:
            del self._full[content.digest]
        listed = self._after[key := (content.before, content.tokens[0])]
        del listed[block]
        if not listed:
            del self._after[key]

    def forget_all(self) -> None:
        """Drops the content of all blocks, as when the memory behind them is lost."""
        while self._idle:
            block, _ = self._idle.popitem()
            self._forget(block)
            self._free.append(block)


def _keys(text: Sequence[int]) -> list[bytes]:
    """What each block of an encoder's output depends on: the whole text, and its place."""
    whole = chain(b"", text)
    return [chain(whole, [index]) for index in range(-(-len(text) // BLOCK))]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


@dataclass(eq=False)
class Held:
    """The blocks of one sequence.

    Attributes:
        seed: what else its blocks depend on, such as an encoder's text.
        tables: of each group, the block of tokens 64 j .. 64 j + 63.
        digests: of the beginnings that end with each full block described so far, from `seed` on.
        encoder: blocks of the encoder's output that cross-attention reads.
        filled: whether these have what they should.
    """

    seed: bytes
    tables: dict[str, list[int]]
    digests: list[bytes] = field(default_factory=list)
    encoder: list[int] = field(default_factory=list)
    filled: bool = True

    def __post_init__(self) -> None:
        self.digests = self.digests or [self.seed]


@dataclass(frozen=True)
class Copy:
    """A block to be copied before anything else is computed."""

    group: str
    source: int
    target: int


class BlockManager:
    """The pools of all groups, and the sequences that hold their blocks.

    Attributes:
        pools: by group of a decoder's own attentions.
        encoder: of cross-attention, where there is one.
    """

    def __init__(self, pools: Mapping[str, BlockPool], encoder: BlockPool | None = None) -> None:
        self.pools, self.encoder = dict(pools), encoder

    def start(
        self, tokens: Sequence[int], seed: bytes = b"", *, reuse: bool = True
    ) -> tuple[Held, int, list[Copy]]:
        """Blocks for a new sequence: those that hold its beginning already.

        Returns:
            The blocks; how many of the tokens they hold, at most all but the last, whose logits
            have to be computed; copies to be made.
        """
        held = Held(seed, {name: [] for name in self.pools})
        if not reuse:
            return held, 0, []
        most = len(tokens) - 1
        found = self._full_blocks(held, tokens, most)
        count = len(held.digests) - 1
        for name, blocks in found.items():
            for block in blocks[:count]:
                held.tables[name].append(GIVEN_BACK if block is None else block)
                if block is not None:
                    self.pools[name].share(block)
        begin = count * BLOCK
        shared, copies = self._part(held, tokens[begin:most])
        return held, begin + shared, copies

    def _full_blocks(
        self, held: Held, tokens: Sequence[int], most: int
    ) -> dict[str, list[int | None]]:
        """The longest run of full blocks that every group can use; digests are left in `held`."""
        found: dict[str, list[int | None]] = {name: [] for name in self.pools}
        while (end := len(held.digests) * BLOCK) <= most:
            digest = chain(held.digests[-1], tokens[end - BLOCK : end])
            blocks = {name: pool.find(digest) for name, pool in self.pools.items()}
            if any(block is None and not self.pools[n].window for n, block in blocks.items()):
                break
            held.digests.append(digest)
            for name, block in blocks.items():
                found[name].append(block)
        while len(held.digests) > 1 and not self._in_sight(found, len(held.digests) - 1):
            held.digests.pop()
        # What stands before a window is not needed.
        for name, listed in found.items():
            first = self._first_needed(name, (len(held.digests) - 1) * BLOCK)
            found[name] = [*([None] * first), *listed[first:]]
        return found

    def _first_needed(self, group: str, position: int) -> int:
        """The first block that a token at a position looks at."""
        window = self.pools[group].window
        return 0 if window is None else max(0, position - window + 1) // BLOCK

    def _in_sight(self, found: Mapping[str, list[int | None]], count: int) -> bool:
        """Whether the token after `count` blocks finds all that its windows show it."""
        return all(
            None not in blocks[self._first_needed(name, count * BLOCK) : count]
            for name, blocks in found.items()
        )

    def _part(self, held: Held, tokens: Sequence[int]) -> tuple[int, list[Copy]]:
        """Copies of blocks that hold some of the tokens that follow what is held."""
        parts = {n: pool.find_part(held.digests[-1], tokens) for n, pool in self.pools.items()}
        shared = min((count for count, _ in parts.values()), default=0)
        if shared < WORTH_A_COPY or any(not pool.available for pool in self.pools.values()):
            return 0, []
        copies: list[Copy] = []
        for name, (_, source) in parts.items():
            # Held while the copy's target is taken, so that it is not this block.
            self.pools[name].share(source)
            target = self.pools[name].take()
            self.pools[name].give_back(source)
            if target is None:
                self._undo(copies, held)
                return 0, []
            copies.append(Copy(name, source, target))
            held.tables[name].append(target)
        return shared, copies

    def _undo(self, copies: Iterable[Copy], held: Held) -> None:
        for copy in copies:
            self.pools[copy.group].give_back(held.tables[copy.group].pop())

    def reserve_all(self, held: Held, length: int, spare: int) -> bool:
        """Makes room for `length` tokens in the groups without a window, if blocks are left over.

        A windowed group has enough for every slot, and takes its blocks as the window moves on.
        """
        for name, table in held.tables.items():
            pool = self.pools[name]
            wanted = max(0, -(-length // BLOCK) - len(table))
            if pool.window is None and pool.available < wanted + spare:
                return False
        for name, table in held.tables.items():
            pool = self.pools[name]
            while pool.window is None and len(table) * BLOCK < length:
                block = pool.take()
                assert block is not None, "they were counted"
                table.append(block)
        return True

    def reserve(self, held: Held, length: int) -> bool:
        """Makes room for `length` tokens; whether there is enough. What was taken stays held."""
        for name, table in held.tables.items():
            while len(table) * BLOCK < length:
                block = self.pools[name].take()
                if block is None:
                    return False
                table.append(block)
        return True

    def take_encoder(self, held: Held, text: Sequence[int]) -> bool:
        """Blocks for an encoder's output, those of the same text if there are; False: no room."""
        assert self.encoder is not None, "only cross-attention has them"
        keys = _keys(text)
        same = [self.encoder.find(chain(key, _WHOLE)) for key in keys]
        if None not in same:
            held.encoder = [block for block in same if block is not None]
            for block in held.encoder:
                self.encoder.share(block)
            return True
        if self.encoder.available < len(keys):
            return False
        held.filled = False
        for _ in keys:
            taken = self.encoder.take()
            assert taken is not None, "they were counted"
            held.encoder.append(taken)
        return True

    def describe_encoder(self, held: Held, text: Sequence[int]) -> None:
        """Notes that the encoder's output is in its blocks."""
        assert self.encoder is not None, "only cross-attention has them"
        held.filled = True
        for block, key in zip(held.encoder, _keys(text), strict=True):
            self.encoder.describe(block, key, _WHOLE)

    def describe(self, held: Held, tokens: Sequence[int], computed: int) -> None:
        """Notes the first `computed` tokens of a sequence, which its blocks hold by now."""
        while (begin := (len(held.digests) - 1) * BLOCK) < computed:
            end = min(begin + BLOCK, computed)
            part, before = tuple(tokens[begin:end]), held.digests[-1]
            for name, table in held.tables.items():
                if table[begin // BLOCK] != GIVEN_BACK:
                    self.pools[name].describe(table[begin // BLOCK], before, part)
            if len(part) < BLOCK:
                break
            held.digests.append(chain(before, part))

    def slide(self, held: Held, position: int) -> None:
        """Gives back what no token from `position` on looks at."""
        for name, table in held.tables.items():
            for index in range(min(self._first_needed(name, position), len(table)) - 1, -1, -1):
                if table[index] == GIVEN_BACK:
                    break
                self.pools[name].give_back(table[index])
                table[index] = GIVEN_BACK

    def fork(self, held: Held, length: int) -> tuple[Held, list[Copy]] | None:
        """A second holder of the first `length` tokens, with a copy of a block that is not full.

        Returns:
            None where there is no block for the copy.
        """
        full, rest = divmod(length, BLOCK)
        other = Held(held.seed, {}, held.digests[: full + 1], list(held.encoder))
        for block in held.encoder:
            assert self.encoder is not None, "only cross-attention has them"
            self.encoder.share(block)
        copies: list[Copy] = []
        for name, table in held.tables.items():
            other.tables[name] = table[:full]
            for block in table[:full]:
                if block != GIVEN_BACK:
                    self.pools[name].share(block)
        for name, table in held.tables.items():
            if not rest:
                break
            target = self.pools[name].take()
            if target is None:
                self.free(other)
                return None
            other.tables[name].append(target)
            copies.append(Copy(name, table[full], target))
        return other, copies

    def free(self, held: Held) -> None:
        """Gives back all blocks, the last ones first: the beginning is kept longest."""
        for name, table in held.tables.items():
            while table:
                if (block := table.pop()) != GIVEN_BACK:
                    self.pools[name].give_back(block)
        while held.encoder:
            assert self.encoder is not None, "only cross-attention has them"
            self.encoder.give_back(held.encoder.pop())

    def _all(self) -> list[BlockPool]:
        return [*self.pools.values(), *([self.encoder] if self.encoder else [])]

    @property
    def held(self) -> int:
        """Blocks that somebody holds, of all groups."""
        return sum(pool.held for pool in self._all())

    def forget_all(self) -> None:
        """Drops all content that nobody holds."""
        for pool in self._all():
            pool.forget_all()
