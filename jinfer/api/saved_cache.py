"""Saved KV cache: writes blocks of the prefix cache to a file, and loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinfer.api.build_engine import offload_refusal
from jinfer.engine.engine import Engine
from jinfer.engine.offload.block_io import (
    BATCH,
    PartRows,
    block_bytes_of,
    block_nbytes,
    gather,
    on_host,
    scatter,
    transfer_steps,
)
from jinfer.engine.offload.cache_file import (
    CacheFileError,
    SavedBlock,
    read_cache_file,
    write_cache_file,
)
from jinfer.engine.offload.prefix_offload import cache_identity
from jinfer.engine.requests import RequestError
from jinfer.engine.scheduling.block_manager import BlockManager
from jinfer.engine.scheduling.block_pool import chain_hash
from jinfer.engine.scheduling.prefix_blocks import enter, pool_of
from jinfer.engine.scheduling.state_pool import StatePool
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.attention.kv_cache import BLOCK, STATE

if TYPE_CHECKING:
    from jinfer.api.session import Session


class CachedBlock(NamedTuple):
    """A block of the device that has content; attributes as of `SavedBlock`."""

    group: str
    block: int
    before: bytes
    tokens: tuple[int, ...]


def block_sizes(engine: Engine) -> dict[str, int]:
    """Bytes of a block of each group."""
    abstract = engine.runner.programs.abstract_rows(1)
    return {g: block_nbytes(abstract, g, 1) for g in row_groups(engine.runner.model.caches)}


def all_blocks(engine: Engine) -> list[CachedBlock]:
    """All blocks of the prefix cache."""
    return [
        CachedBlock(group, block, content.before, content.tokens)
        for group in row_groups(engine.runner.model.caches)
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
            return sequence.seed, sequence.cache_ids[: sequence.computed]
    return engine.slot_prefixes.get(slot, (b"", []))


def erase_slot(engine: Engine, slot: int) -> int:
    """Removes what device and offload have of a slot's sequence; returns its number of tokens.

    Blocks that running sequences share stay.
    """
    seed, tokens = prefix_of_slot(engine, slot)
    for item in reversed(blocks_of_slot(engine, slot)):
        pool_of(engine.scheduler.blocks, item.group).forget(item.block)
    if engine.offload is not None:
        groups = row_groups(engine.runner.model.caches)
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
    for item in listed:
        has = pool_of(engine.scheduler.blocks, item.group).content(item.block)
        same = has is not None and (has.before, has.tokens[: len(item.tokens)]) == item[2:]
        if same:
            placed.append((len(ids.setdefault(item.group, [])), item))
            ids[item.group].append(item.block)
    return (placed, *gather(engine.runner, ids)) if placed else None


def contents_of(
    placed: Sequence[tuple[int, CachedBlock]], rows: PartRows, count: int
) -> Iterator[SavedBlock]:
    """The blocks that were read; waits for them. Not on the engine's thread."""
    arrays = on_host(rows)
    for row, item in placed:
        content = block_bytes_of(arrays, item.group, row, count)
        yield SavedBlock(item.group, item.before, item.tokens, content)


def write_blocks(engine: Engine, listed: Sequence[SavedBlock], entered: dict[str, int]) -> bool:
    """Enters blocks into the prefix cache, at most `BATCH`.

    Args:
        entered: blocks of each group that the same file has given so far; counts on.

    Returns:
        False if there is no room for all: others of the same file would be evicted.
    """
    blocks, fits = engine.scheduler.blocks, True
    contents: dict[str, dict[int, bytes]] = {}
    taken: list[tuple[SavedBlock, int]] = []
    for item in listed:
        if _is_cached(blocks, item):
            continue
        pool, before = pool_of(blocks, item.group), entered.get(item.group, 0)
        block = pool.allocate() if pool.available > before else None
        if block is None:
            fits = False
            break
        taken.append((item, block))
        contents.setdefault(item.group, {})[block] = item.content
    if not taken:
        return fits
    try:
        scatter(engine.runner, contents)
    except BaseException:
        for item, block in taken:
            pool_of(blocks, item.group).release(block)
        raise
    for item, block in taken:
        enter(blocks, item.group, block, item.before, item.tokens)
        entered[item.group] = entered.get(item.group, 0) + 1
    return fits


def _is_cached(blocks: BlockManager, item: SavedBlock) -> bool:
    pool = pool_of(blocks, item.group)
    if isinstance(pool, StatePool):
        return pool.has([item.before], item.tokens)
    return pool.lookup_partial(item.before, item.tokens)[0] == len(item.tokens)


@dataclass(frozen=True)
class SavedCache:
    """What was saved or loaded.

    Attributes:
        tokens: whose keys and values it has.
        nbytes: of the file.
    """

    tokens: int
    nbytes: int


def save_cache(session: Session, path: str | Path, slot: int | None = None) -> SavedCache:
    """As `LLM.save_cache`.

    Args:
        slot: only what there is of the sequence that had this slot last; None: all.
    """
    engine, path = _ready(session), Path(path).expanduser()
    list_blocks = all_blocks if slot is None else partial(blocks_of_slot, slot=slot)
    listed: list[CachedBlock] = session.thread.run(list_blocks)
    blocks = _BlocksSeen(_read(session, listed))
    try:
        nbytes = write_cache_file(path, _identity(engine), blocks)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
    return SavedCache(len(blocks.tokens), nbytes)


def load_cache(session: Session, path: str | Path, slot: int | None = None) -> SavedCache:
    """As `LLM.load_cache`.

    Args:
        slot: a slot that has had the sequence of this file from now on.
    """
    engine, path = _ready(session), Path(path).expanduser()
    entered: dict[str, int] = {}
    try:
        blocks = _BlocksSeen(read_cache_file(path, _identity(engine), block_sizes(engine)))
        for batch in batched(blocks, BATCH):
            if not session.thread.run(partial(write_blocks, listed=batch, entered=entered)):
                break
        nbytes = path.stat().st_size
        if slot is not None:
            engine.slot_prefixes[slot] = blocks.seed, blocks.tokens
    except CacheFileError as error:
        raise RequestError(f"{path} {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be read: {reason}") from None
    return SavedCache(len(blocks.tokens), nbytes)


def _ready(session: Session) -> Engine:
    """The engine, once it has the programs that are needed."""
    engine = session.engine
    if not engine.runner.model.caches:
        raise RequestError("the model has no decoder, so there is no cache")
    if reason := offload_refusal(engine):
        raise RequestError(f"the cache cannot be saved {reason}")
    # Here, as the engine's thread would stop for it.
    for future in engine.runner.programs.announce(transfer_steps()):
        future.result()
    return engine


def _identity(engine: Engine) -> str:
    return cache_identity(engine.runner.programs, engine.weights_key)


def _read(session: Session, listed: Sequence[CachedBlock]) -> Iterator[SavedBlock]:
    for batch in batched(listed, BATCH):
        read = session.thread.run(partial(read_blocks, listed=batch))
        if read is not None:
            yield from contents_of(*read)


class _BlocksSeen:
    """Blocks, and what is known of those that were taken.

    Attributes:
        seed: hash before the first one; of a sequence `BlockTables.seed`.
        tokens: those of the group of keys and values that has most of them, in order.
    """

    def __init__(self, blocks: Iterable[SavedBlock]) -> None:
        self._blocks = blocks
        self._tokens: dict[str, list[int]] = {}
        self.seed = b""

    @property
    def tokens(self) -> list[int]:
        return max(self._tokens.values(), key=len, default=[])

    def __iter__(self) -> Iterator[SavedBlock]:
        for block in self._blocks:
            if block.group != STATE:
                self.seed = self.seed if self._tokens else block.before
                self._tokens.setdefault(block.group, []).extend(block.tokens)
            yield block
