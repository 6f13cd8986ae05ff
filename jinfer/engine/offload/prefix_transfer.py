"""Prefix transfer: reads blocks of the prefix cache for a file, and enters those of a file.

Jobs of the engine's thread, a batch of blocks each, so that its steps go on in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jinfer.engine.engine import Engine
from jinfer.engine.offload.block_bytes import PartRows, block_bytes_of, block_nbytes, on_host
from jinfer.engine.offload.block_io import gather, scatter
from jinfer.engine.offload.cache_file import SavedBlock
from jinfer.engine.scheduling.block_manager import BlockManager
from jinfer.engine.scheduling.block_pool import chain_hash
from jinfer.engine.scheduling.prefix_blocks import enter, pool_of
from jinfer.engine.scheduling.state_pool import StatePool
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.attention.kv_cache import BLOCK, STATE


class CachedBlock(NamedTuple):
    """A block of the device that has content; attributes as of `SavedBlock`."""

    group: str
    block: int
    before: bytes
    tokens: tuple[int, ...]


def block_sizes(engine: Engine) -> dict[str, int]:
    """Bytes of a block of each group."""
    abstract = engine.programs.abstract_rows(1)
    return {g: block_nbytes(abstract, g, 1) for g in row_groups(engine.model.caches)}


def all_blocks(engine: Engine) -> list[CachedBlock]:
    """All blocks of the prefix cache."""
    return [
        CachedBlock(group, block, content.before, content.tokens)
        for group in row_groups(engine.model.caches)
        for block, content in pool_of(engine.scheduler.blocks, group).contents()
    ]


def blocks_of_slot(engine: Engine, slot: int) -> list[CachedBlock]:
    """What the prefix cache has of the sequence that a slot had last, or has now."""
    seed, tokens = prefix_of_slot(engine, slot)
    blocks, found = engine.scheduler.blocks, list[CachedBlock]()
    for before, part in _parts(seed, tokens):
        for group, pool in blocks.pools.items():
            count, block = pool.lookup_partial(before, part)
            if count:
                found.append(CachedBlock(group, block, before, part[:count]))
    if blocks.states is not None:
        for _, block in blocks.states.prefixes(seed, tokens, len(tokens)):
            snapshot = blocks.states.content(block)
            assert snapshot is not None, "it was found"
            found.append(CachedBlock(STATE, block, snapshot.before, snapshot.tokens))
    return found


def prefix_of_slot(engine: Engine, slot: int) -> tuple[bytes, list[int]]:
    """`BlockTables.seed` and the computed tokens of the sequence that a slot has, or had last."""
    for sequence in engine.scheduler.running:
        if sequence.known_slot == slot:
            return sequence.seed, sequence.tokens[: sequence.computed]
    return engine.slot_prefixes.get(slot, (b"", []))


def erase_slot(engine: Engine, slot: int) -> int:
    """Removes what device and offload have of a slot's sequence; returns its number of tokens.

    Blocks that running sequences share stay.
    """
    seed, tokens = prefix_of_slot(engine, slot)
    for one in reversed(blocks_of_slot(engine, slot)):
        pool_of(engine.scheduler.blocks, one.group).forget(one.block)
    if engine.offload is not None:
        groups = row_groups(engine.model.caches)
        digests = [chain_hash(before, part) for before, part in _parts(seed, tokens)]
        engine.offload.forget([(group, digest) for digest in digests for group in groups])
    engine.slot_prefixes.pop(slot, None)
    return len(tokens)


def _parts(seed: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The tokens of each block of a sequence, and the hash of all before; the last is not full."""
    before = seed
    for begin in range(0, len(tokens), BLOCK):
        part = tuple(tokens[begin : begin + BLOCK])
        yield before, part
        before = chain_hash(before, part)


def read_blocks(
    engine: Engine, listed: Sequence[CachedBlock]
) -> tuple[list[tuple[int, CachedBlock]], PartRows, int] | None:
    """Launches a copy of some blocks, at most `BATCH`; those that have changed are left out.

    Returns:
        Each block with its row, and what `gather` gives; None if none is left.
    """
    placed, ids = list[tuple[int, CachedBlock]](), dict[str, list[int]]()
    for one in listed:
        has = pool_of(engine.scheduler.blocks, one.group).content(one.block)
        same = has is not None and (has.before, has.tokens[: len(one.tokens)]) == one[2:]
        if same:
            placed.append((len(ids.setdefault(one.group, [])), one))
            ids[one.group].append(one.block)
    return (placed, *gather(engine, ids)) if placed else None


def contents_of(
    placed: Sequence[tuple[int, CachedBlock]], rows: PartRows, count: int
) -> Iterator[SavedBlock]:
    """The blocks that were read; waits for them. Not on the engine's thread."""
    arrays = on_host(rows)
    for row, one in placed:
        content = block_bytes_of(arrays, one.group, row, count)
        yield SavedBlock(one.group, one.before, one.tokens, content)


def write_blocks(engine: Engine, listed: Sequence[SavedBlock], entered: dict[str, int]) -> bool:
    """Enters blocks into the prefix cache, at most `BATCH`.

    Args:
        entered: blocks of each group that the same file has given so far; counts on.

    Returns:
        False if there is no room for all: others of the same file would be evicted.
    """
    blocks, room = engine.scheduler.blocks, True
    contents: dict[str, dict[int, bytes]] = {}
    taken: list[tuple[SavedBlock, int]] = []
    for one in listed:
        if _is_cached(blocks, one):
            continue
        pool, before = pool_of(blocks, one.group), entered.get(one.group, 0)
        block = pool.allocate() if pool.available > before else None
        if block is None:
            room = False
            break
        taken.append((one, block))
        contents.setdefault(one.group, {})[block] = one.content
    if not taken:
        return room
    try:
        scatter(engine, contents)
    except BaseException:
        for one, block in taken:
            pool_of(blocks, one.group).release(block)
        raise
    for one, block in taken:
        enter(blocks, one.group, block, one.before, one.tokens)
        entered[one.group] = entered.get(one.group, 0) + 1
    return room


def _is_cached(blocks: BlockManager, one: SavedBlock) -> bool:
    pool = pool_of(blocks, one.group)
    if isinstance(pool, StatePool):
        return pool.has([one.before], one.tokens)
    return pool.lookup_partial(one.before, one.tokens)[0] == len(one.tokens)
