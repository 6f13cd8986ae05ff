"""Prefix blocks: the blocks of a prompt's longest prefix that device and offload have together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jinfer.engine.scheduling.block_manager import BlockManager
from jinfer.engine.scheduling.block_pool import BlockPool, chain_hash
from jinfer.engine.scheduling.state_pool import Snapshot, StatePool
from jinfer.ops.attention.kv_cache import BLOCK, STATE


class PrefixBlock(NamedTuple):
    """A full block of a prefix, or the recurrent states after it.

    Attributes:
        group: its cache group.
        place: its index among the blocks of the sequence.
        before, digest: hashes of the prefixes that end before and with it.
    """

    group: str
    place: int
    before: bytes
    digest: bytes


def pool_of(blocks: BlockManager, group: str) -> BlockPool | StatePool:
    """The pool of a group, an encoder's excepted."""
    if group != STATE:
        return blocks.pools[group]
    assert blocks.states is not None, "only then there is such a group"
    return blocks.states


def prefix_blocks(
    blocks: BlockManager,
    tokens: Sequence[int],
    seed: bytes,
    stored: Callable[[str, bytes], bool],
) -> list[PrefixBlock]:
    """The blocks of the longest prefix that a prompt could begin with, first to last.

    Args:
        seed: as `BlockTables.seed`.
        stored: whether the block of a group that ends the prefix with some hash is offloaded.
    """

    def has(group: str, digest: bytes) -> bool:
        return pool_of(blocks, group).lookup(digest) is not None or stored(group, digest)

    digests, found = [seed], {name: list[bool]() for name in blocks.pools}
    while (end := len(digests) * BLOCK) < len(tokens):
        digest = chain_hash(digests[-1], tokens[end - BLOCK : end])
        here = {name: has(name, digest) for name in blocks.pools}
        if any(not here[name] and pool.window is None for name, pool in blocks.pools.items()):
            break
        digests.append(digest)
        for name, known in here.items():
            found[name].append(known)

    def usable(count: int) -> bool:
        if blocks.states is not None and not has(STATE, digests[count]):
            return False
        firsts = {name: blocks.first_needed(name, count * BLOCK) for name in found}
        return all(all(known[firsts[name] : count]) for name, known in found.items())

    count = len(digests) - 1
    while count and not usable(count):
        count -= 1
    needed = [
        PrefixBlock(name, index, digests[index], digests[index + 1])
        for index in range(count)
        for name in found
        if index >= blocks.first_needed(name, count * BLOCK)
    ]
    if count and blocks.states is not None:
        needed.append(PrefixBlock(STATE, count - 1, digests[count - 1], digests[count]))
    return needed


def enter(
    blocks: BlockManager, group: str, block: int, before: bytes, tokens: Sequence[int]
) -> None:
    """Enters an allocated block, which has been filled, into the prefix cache; unused.

    Args:
        before: hash of the prefix before its tokens.
        tokens: those of the block; of recurrent states, those after the last whole block.
    """
    pool = pool_of(blocks, group)
    if isinstance(pool, StatePool):
        pool.keep_snapshot(block, Snapshot(before, tuple(tokens)))
    else:
        pool.register(block, before, tuple(tokens))
        pool.release(block)
