"""Block manager: paged KV cache, prefix cache, block tables with reference counts.

A block has the keys and values of `BLOCK` tokens of one sequence, for all attentions of a group.
Prefix cache: the content of a block is identified by its tokens and a hash of all tokens before
them. A sequence with the same prefix shares the block instead of computing it again. Shared blocks
are never written to: full blocks do not change, and a block that matches in part is copied. Unused
blocks keep their content until they are needed, the least recently used is evicted first (LRU).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jinfer.engine.requests import AdapterUse
from jinfer.engine.scheduling.block_pool import BlockPool, chain_hash
from jinfer.engine.scheduling.state_pool import RetentionPriority, StatePool
from jinfer.ops.attention.kv_cache import BLOCK, STATE

MIN_COPY_TOKENS = 8  # computing fewer tokens is faster than copying a block
RELEASED = -1  # in a block table: a block that the sliding window has left behind
_WHOLE = (0,) * BLOCK  # content of an encoder's block, whose key identifies it alone


def _keys(text: Sequence[int]) -> list[bytes]:
    """Key of each block of an encoder's output: hash of the whole text and the block's index."""
    whole = chain_hash(b"", text)
    return [chain_hash(whole, [index]) for index in range(-(-len(text) // BLOCK))]


@dataclass(eq=False)
class BlockTables:
    """The block tables of one sequence.

    Attributes:
        seed: what the content of its blocks depends on besides the tokens, such as an encoder's
            text.
        by_group: the block table of each group: entry j is the block of tokens 64 j .. 64 j + 63.
        digests: hashes of the prefixes that end with each full block registered so far, `seed`
            first.
        encoder: blocks of the encoder's output, for cross-attention.
        encoder_filled: whether the encoder's output has been written to these.
        state: block of its recurrent states.
        borders: where these are still to be copied, as of `border_snapshots`, and why.
        copies: block for the copy at each border of the step that is about to be launched.
        adapter: the LoRA adapter that they are computed with; None: none.
        offset: rotary position minus index of the tokens of text that are computed next.
    """

    seed: bytes
    by_group: dict[str, list[int]]
    digests: list[bytes] = field(default_factory=list)
    encoder: list[int] = field(default_factory=list)
    encoder_filled: bool = True
    state: int | None = None
    borders: dict[int, RetentionPriority] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    adapter: AdapterUse | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        self.digests = self.digests or [self.seed]


@dataclass(frozen=True)
class BlockCopy:
    """A block to copy before anything else is computed."""

    group: str
    source: int
    target: int


class BlockManager:
    """Allocates the blocks of all groups to sequences.

    Attributes:
        pools: by group of the decoder's self-attentions.
        encoder: pool of cross-attention; None without one.
        states: pool of recurrent states; None without any.
    """

    def __init__(
        self,
        pools: Mapping[str, BlockPool],
        encoder: BlockPool | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.pools, self.encoder, self.states = dict(pools), encoder, states

    def share_prefix(
        self,
        tokens: Sequence[int],
        seed: bytes = b"",
        *,
        reuse: bool = True,
        limit: int | None = None,
    ) -> tuple[BlockTables, int, list[BlockCopy]]:
        """Prefix cache: block tables of a new sequence with the cached blocks of its prefix.

        Args:
            seed: as `BlockTables.seed`.
            reuse: whether cached blocks may be used.
            limit: maximum number of cached tokens; None: all but the last.

        Returns:
            The tables; number of cached tokens, at most all but the last, whose logits have to be
            computed; copies to make.
        """
        limit = len(tokens) - 1 if limit is None else limit
        if not reuse or self.states is None:
            return self._share_blocks(tokens, seed, limit if reuse else 0, MIN_COPY_TOKENS)
        for length, snapshot in self.states.prefixes(seed, tokens, limit):
            tables, shared, copies = self._share_blocks(tokens, seed, length, 1)
            state = self.states.copy_of(snapshot) if shared == length else None
            if state is not None:
                tables.state = state
                return tables, length, [*copies, BlockCopy(STATE, snapshot, state)]
            self.free(tables)
        return self._share_blocks(tokens, seed, 0, 1)

    def _share_blocks(
        self, tokens: Sequence[int], seed: bytes, limit: int, least: int
    ) -> tuple[BlockTables, int, list[BlockCopy]]:
        """`share_prefix` of keys and values, of `limit` tokens at most.

        Args:
            least: tokens of a block for which it is copied.
        """
        tables = BlockTables(seed, {name: [] for name in self.pools})
        cached = self._full_blocks(tables, tokens, limit)
        count = len(tables.digests) - 1
        for name, blocks in cached.items():
            for block in blocks[:count]:
                tables.by_group[name].append(RELEASED if block is None else block)
                if block is not None:
                    self.pools[name].add_reference(block)
        begin = count * BLOCK
        shared, copies = self._share_partial_block(tables, tokens[begin:limit], least)
        return tables, begin + shared, copies

    def _full_blocks(
        self, tables: BlockTables, tokens: Sequence[int], limit: int
    ) -> dict[str, list[int | None]]:
        """The longest run of full blocks that every group can use; adds digests to `tables`."""
        cached: dict[str, list[int | None]] = {name: [] for name in self.pools}
        while (end := len(tables.digests) * BLOCK) <= limit:
            digest = chain_hash(tables.digests[-1], tokens[end - BLOCK : end])
            blocks = {name: pool.lookup(digest) for name, pool in self.pools.items()}
            if any(block is None and not self.pools[n].window for n, block in blocks.items()):
                break
            tables.digests.append(digest)
            for name, block in blocks.items():
                cached[name].append(block)
        while len(tables.digests) > 1 and not self._windows_cached(cached, len(tables.digests) - 1):
            tables.digests.pop()
        # Blocks before the sliding window are not needed.
        for name, listed in cached.items():
            first = self.first_needed(name, (len(tables.digests) - 1) * BLOCK)
            cached[name] = [*([None] * first), *listed[first:]]
        return cached

    def first_needed(self, group: str, position: int) -> int:
        """The first block that a token at a position attends to."""
        window = self.pools[group].window
        return 0 if window is None else max(0, position - window + 1) // BLOCK

    def _windows_cached(self, cached: Mapping[str, list[int | None]], count: int) -> bool:
        """Whether the token after `count` blocks finds all blocks in its sliding windows."""
        return all(
            None not in blocks[self.first_needed(name, count * BLOCK) : count]
            for name, blocks in cached.items()
        )

    def _share_partial_block(
        self, tables: BlockTables, tokens: Sequence[int], least: int
    ) -> tuple[int, list[BlockCopy]]:
        """Copies of cached blocks that have some of the tokens after the full blocks."""
        parts = {
            n: pool.lookup_partial(tables.digests[-1], tokens) for n, pool in self.pools.items()
        }
        shared = min((count for count, _ in parts.values()), default=len(tokens))
        if shared < least or any(not pool.available for pool in self.pools.values()):
            return 0, []
        copies: list[BlockCopy] = []
        for name, (_, source) in parts.items():
            # A reference while the target is allocated, so that it is not this block.
            self.pools[name].add_reference(source)
            target = self.pools[name].allocate()
            self.pools[name].release(source)
            if target is None:
                self._undo(copies, tables)
                return 0, []
            copies.append(BlockCopy(name, source, target))
            tables.by_group[name].append(target)
        return shared, copies

    def _undo(self, copies: Iterable[BlockCopy], tables: BlockTables) -> None:
        for copy in copies:
            self.pools[copy.group].release(tables.by_group[copy.group].pop())

    def reserve_all(self, tables: BlockTables, length: int, spare: int) -> bool:
        """Allocates blocks for `length` tokens in the groups without a sliding window.

        A windowed group has enough blocks for every slot, and allocates as the window moves on.

        Args:
            spare: blocks of each group that have to stay available.

        Returns:
            False, with nothing allocated, if there are too few blocks.
        """
        for name, table in tables.by_group.items():
            pool = self.pools[name]
            needed = max(0, -(-length // BLOCK) - len(table))
            if pool.window is None and pool.available < needed + spare:
                return False
        if not self._reserve_state(tables):
            return False
        for name, table in tables.by_group.items():
            pool = self.pools[name]
            while pool.window is None and len(table) * BLOCK < length:
                block = pool.allocate()
                assert block is not None, "they were counted"
                table.append(block)
        return True

    def reserve(self, tables: BlockTables, length: int) -> bool:
        """Allocates blocks for `length` tokens; False if there are too few, some then allocated."""
        if not self._reserve_state(tables):
            return False
        for name, table in tables.by_group.items():
            while len(table) * BLOCK < length:
                block = self.pools[name].allocate()
                if block is None:
                    return False
                table.append(block)
        return True

    def _reserve_state(self, tables: BlockTables) -> bool:
        """Allocates the block of a sequence's recurrent states; False if there is none."""
        if self.states is not None and tables.state is None:
            tables.state = self.states.allocate()
        return self.states is None or tables.state is not None

    def reserve_encoder(self, tables: BlockTables, text: Sequence[int]) -> bool:
        """Allocates blocks for an encoder's output, or shares those of the same text.

        Returns:
            False if there are too few blocks.
        """
        assert self.encoder is not None, "only cross-attention has them"
        keys = _keys(text)
        same = [self.encoder.lookup(chain_hash(key, _WHOLE)) for key in keys]
        if None not in same:
            tables.encoder = [block for block in same if block is not None]
            for block in tables.encoder:
                self.encoder.add_reference(block)
            return True
        if self.encoder.available < len(keys):
            return False
        tables.encoder_filled = False
        for _ in keys:
            taken = self.encoder.allocate()
            assert taken is not None, "they were counted"
            tables.encoder.append(taken)
        return True

    def register_encoder(self, tables: BlockTables, text: Sequence[int]) -> None:
        """Enters an encoder's output, which has been computed, into the prefix cache."""
        assert self.encoder is not None, "only cross-attention has them"
        tables.encoder_filled = True
        for block, key in zip(tables.encoder, _keys(text), strict=True):
            self.encoder.register(block, key, _WHOLE)

    def register(self, tables: BlockTables, tokens: Sequence[int], computed: int) -> None:
        """Enters the first `computed` tokens of a sequence into the prefix cache."""
        while (begin := (len(tables.digests) - 1) * BLOCK) < computed:
            end = min(begin + BLOCK, computed)
            content, before = tuple(tokens[begin:end]), tables.digests[-1]
            for name, table in tables.by_group.items():
                if table[begin // BLOCK] != RELEASED:
                    self.pools[name].register(table[begin // BLOCK], before, content)
            if len(content) < BLOCK:
                break
            tables.digests.append(chain_hash(before, content))
            if self.states is not None:
                self.states.note(tables.digests[-1])

    def snapshot(self, tables: BlockTables, tokens: Sequence[int]) -> list[BlockCopy]:
        """Copies a sequence's recurrent states, which are those after `tokens`, for other prompts.

        Called after `register`, and only if no other sequence needs the block for itself.
        """
        if self.states is None or tables.state is None or not self.states.limit:
            return []
        if self.states.has(tables.digests, tokens):
            return []
        block = self.states.allocate()
        if block is None:
            return []
        self.states.keep(block, tables.digests, tokens, RetentionPriority.SHARED)
        return [BlockCopy(STATE, tables.state, block)]

    def keep_state(self, tables: BlockTables, tokens: Sequence[int]) -> None:
        """Turns a sequence's recurrent states into a snapshot, as it ends after `tokens`."""
        if self.states is not None and tables.state is not None and tokens:
            self.register(tables, tokens, len(tokens))
            self.states.keep(tables.state, tables.digests, tokens)
            tables.state = None

    def slide_window(self, tables: BlockTables, position: int) -> None:
        """Sliding window: releases blocks that no token from `position` on attends to."""
        for name, table in tables.by_group.items():
            for index in range(min(self.first_needed(name, position), len(table)) - 1, -1, -1):
                if table[index] == RELEASED:
                    break
                self.pools[name].release(table[index])
                table[index] = RELEASED

    def fork(self, tables: BlockTables, length: int) -> tuple[BlockTables, list[BlockCopy]] | None:
        """Block tables that share the first `length` tokens; the last block, if partial, is copied.

        So are recurrent states, which have to be those after `length` tokens.

        Returns:
            None if there is no block for a copy.
        """
        full, rest = divmod(length, BLOCK)
        other = BlockTables(tables.seed, {}, tables.digests[: full + 1], list(tables.encoder))
        other.adapter, other.offset = tables.adapter, tables.offset
        for block in tables.encoder:
            assert self.encoder is not None, "only cross-attention has them"
            self.encoder.add_reference(block)
        copies: list[BlockCopy] = []
        for name, table in tables.by_group.items():
            other.by_group[name] = table[:full]
            for block in table[:full]:
                if block != RELEASED:
                    self.pools[name].add_reference(block)
        if tables.state is not None:
            if not self._reserve_state(other):
                self.free(other)
                return None
            assert other.state is not None, "it was reserved"
            copies.append(BlockCopy(STATE, tables.state, other.state))
        for name, table in tables.by_group.items():
            if not rest:
                break
            target = self.pools[name].allocate()
            if target is None:
                self.free(other)
                return None
            other.by_group[name].append(target)
            copies.append(BlockCopy(name, table[full], target))
        return other, copies

    def fork_all(
        self, parents: Sequence[BlockTables], length: int, ends: Sequence[int]
    ) -> tuple[list[BlockTables], list[BlockCopy]] | None:
        """`fork` of several block tables, the i-th with room for `ends[i]` tokens.

        Returns:
            None, with nothing allocated, if there are too few blocks.
        """
        forks, copies = list[BlockTables](), list[BlockCopy]()
        for parent, end in zip(parents, ends, strict=True):
            forked = self.fork(parent, length)
            if forked is not None:
                forks.append(forked[0])
                copies += forked[1]
                self.slide_window(forked[0], length)
            if forked is None or not self.reserve(forked[0], end):
                for tables in forks:
                    self.free(tables)
                return None
        return forks, copies

    def free(self, tables: BlockTables) -> None:
        """Releases all blocks, the last ones first: the prefix stays cached longest."""
        for name, table in tables.by_group.items():
            while table:
                if (block := table.pop()) != RELEASED:
                    self.pools[name].release(block)
        if self.states is not None and tables.state is not None:
            for block in (tables.state, *tables.copies.values()):
                self.states.release(block)
            tables.state = None
            tables.copies.clear()
        while tables.encoder:
            assert self.encoder is not None, "only cross-attention has them"
            self.encoder.release(tables.encoder.pop())

    def _all(self) -> list[BlockPool | StatePool]:
        others = (self.encoder, self.states)
        return [*self.pools.values(), *(pool for pool in others if pool is not None)]

    @property
    def used(self) -> int:
        """Number of blocks in use, of all groups."""
        return sum(pool.used for pool in self._all())

    def clear(self) -> None:
        """Empties the prefix cache."""
        for pool in self._all():
            pool.clear()
