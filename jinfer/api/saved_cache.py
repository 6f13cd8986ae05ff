"""Saved KV cache: writes the blocks of the prefix cache to a file, and loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING

from jinfer.api.offloading import offload_refusal
from jinfer.engine.engine import Engine
from jinfer.engine.offload.block_io import BATCH, transfer_steps
from jinfer.engine.offload.cache_file import (
    CacheFileError,
    SavedBlock,
    read_cache_file,
    write_cache_file,
)
from jinfer.engine.offload.cache_identity import cache_identity
from jinfer.engine.offload.prefix_transfer import (
    CachedBlock,
    all_blocks,
    block_sizes,
    blocks_of_slot,
    contents_of,
    read_blocks,
    write_blocks,
)
from jinfer.engine.requests import RequestError
from jinfer.ops.attention.kv_cache import STATE

if TYPE_CHECKING:
    from jinfer.api.session import Session


@dataclass(frozen=True)
class SavedCache:
    """Size of a saved or loaded cache.

    Attributes:
        tokens: number of tokens whose keys and values it has.
        nbytes: size of the file.
    """

    tokens: int
    nbytes: int


def save_cache(session: Session, path: str | Path, slot: int | None = None) -> SavedCache:
    """Save a cache, as `LLM.save_cache`.

    Args:
        slot: save only the blocks of the sequence that last had this slot; None: all.
    """
    engine, path = _ready(session), Path(path).expanduser()
    listing = all_blocks if slot is None else partial(blocks_of_slot, slot=slot)
    listed: list[CachedBlock] = session.thread.run(listing)
    blocks = _BlocksSeen(_read(session, listed))
    try:
        nbytes = write_cache_file(path, _identity(engine), blocks)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
    return SavedCache(len(blocks.tokens), nbytes)


def load_cache(session: Session, path: str | Path, slot: int | None = None) -> SavedCache:
    """Load a cache, as `LLM.load_cache`.

    Args:
        slot: a slot whose last sequence is this file's from now on.
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
    """Prepare the programs that transfer blocks; return the engine."""
    engine = session.engine
    if not engine.model.caches:
        raise RequestError("the model has no decoder, so there is no cache")
    if reason := offload_refusal(engine):
        raise RequestError(f"the cache cannot be saved {reason}")
    # Compiled here, because the engine's thread would pause for it.
    for future in engine.programs.announce(transfer_steps()):
        future.result()
    return engine


def _identity(engine: Engine) -> str:
    return cache_identity(engine.programs, engine.weights_key)


def _read(session: Session, listed: Sequence[CachedBlock]) -> Iterator[SavedBlock]:
    for batch in batched(listed, BATCH):
        read = session.thread.run(partial(read_blocks, listed=batch))
        if read is not None:
            yield from contents_of(*read)


class _BlocksSeen:
    """Iterates over blocks, and records their tokens.

    Attributes:
        seed: hash before the first block; of a sequence `BlockTables.seed`.
        tokens: tokens in order, of the key-value group with the largest number.
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
