"""Block saver: copies blocks that are complete, or leave the device, to the offload's stores.

With a disk every block is saved once it is complete, so that a process that is killed leaves what
it computed. Host memory has those that another sequence has taken the place of. The engine's thread
only launches a copy on the device; another thread waits for it, and stores it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jinfer.engine.offload.block_io import (
    BATCH,
    PartRows,
    block_bytes_of,
    gather,
    on_host,
    rows_nbytes,
)
from jinfer.engine.offload.offload_stores import Stores, block_key
from jinfer.engine.scheduling.block_pool import ignore
from jinfer.engine.scheduling.prefix_blocks import pool_of
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.attention.kv_cache import STATE

if TYPE_CHECKING:
    from jinfer.engine.runner.model_runner import ModelRunner
    from jinfer.engine.scheduling.scheduler import Scheduler

_LAST_SECONDS = 20.0  # that an engine takes for saving what is left when it is closed
_log = logging.getLogger("jinfer")


class _Block(NamedTuple):
    """A block to save."""

    group: str
    digest: bytes
    block: int

    @property
    def key(self) -> str:
        return block_key(self.group, self.digest)


class BlockSaver:
    """Saves the blocks of an engine. All methods are called on the engine's thread."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, stores: Stores, max_bytes: int
    ) -> None:
        """Listens to the engine's block pools.

        Args:
            max_bytes: bytes on their way to a store at a time, at most.
        """
        self._runner, self._stores, self._most = runner, stores, max_bytes
        self._blocks = scheduler.blocks
        self._complete: dict[tuple[str, bytes], int] = {}
        self._evicted: list[_Block] = []
        self._under_way = 0  # bytes
        self._row = rows_nbytes(runner.programs.abstract_rows(1))
        self._saving: set[str] = set()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-write")
        for group in self._groups:
            pool = pool_of(self._blocks, group)
            pool.on_full = partial(self._on_full, group)
            pool.on_evict = partial(self._on_evict, group)

    @property
    def _groups(self) -> list[str]:
        return row_groups(self._runner.model.caches)

    def _on_full(self, group: str, block: int, digest: bytes) -> None:
        if self._stores.disk is not None or group == STATE:
            self._complete[group, digest] = block

    def _on_evict(self, group: str, block: int, digest: bytes) -> None:
        new = self._complete.pop((group, digest), None)
        if group == STATE and new is not None:
            return  # the copy that fills it may not have been launched
        found = _Block(group, digest, block)
        if found.key not in self._saving and self._stores.lacks(found.key):
            self._evicted.append(found)

    def save_evicted(self) -> None:
        """Launches the copies of evicted blocks; called before a program may write to the cache.

        Of more than there is room for under way, those are saved that were evicted last: a sequence
        gives back its last blocks first.
        """
        if self._evicted:
            fit = max(BATCH, (self._most - self._under_way) // self._row)
            evicted, self._evicted = self._evicted[-fit:], []
            self._save(evicted, evicted=True)

    def save_complete(self) -> None:
        """Launches the copies of complete blocks; those that there is no room for wait."""
        if not self._complete:
            return
        left = [
            _Block(group, digest, block)
            for (group, digest), block in self._complete.items()
            if pool_of(self._blocks, group).lookup(digest) == block
        ]
        self._complete.clear()
        if self._stores.disk is not None:
            missing = [one for one in left if self._wanted_on_disk(one.key)]
            for one in self._save(missing, evicted=False):
                self._complete[one.group, one.digest] = one.block

    def _wanted_on_disk(self, key: str) -> bool:
        disk = self._stores.disk
        return disk is not None and key not in disk and key not in self._saving

    def _save(self, blocks: Sequence[_Block], *, evicted: bool) -> Sequence[_Block]:
        """Launches copies and has them stored; returns those that there was no room for."""
        waiting = {group: [one for one in blocks if one.group == group] for group in self._groups}
        while any(waiting.values()):
            if not evicted and self._under_way >= self._most:
                break
            batch = {group: listed[:BATCH] for group, listed in waiting.items()}
            rows, count = gather(
                self._runner, {group: [one.block for one in each] for group, each in batch.items()}
            )
            waiting = {group: listed[BATCH:] for group, listed in waiting.items()}
            placed = [(i, one) for each in batch.values() for i, one in enumerate(each)]
            size = rows_nbytes(rows)
            with self._lock:
                self._under_way += size
            self._saving.update(one.key for _, one in placed)
            self._run(partial(self._store, rows, count, placed, size, evicted))
        return [one for listed in waiting.values() for one in listed]

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._writer.submit(work)
        except RuntimeError:  # the interpreter exits, and its thread pools take nothing any more
            work()

    def _store(
        self,
        rows: PartRows,
        count: int,
        placed: Iterable[tuple[int, _Block]],
        size: int,
        evicted: bool,
    ) -> None:
        """Waits for a copy and stores its blocks; on the writer's thread."""
        try:
            arrays = on_host(rows)
            for row, one in placed:
                content = block_bytes_of(arrays, one.group, row, count)
                self._stores.put(one.key, content, evicted=evicted)
        except Exception as error:  # blocks that are not saved are computed again
            _log.warning("blocks of the cache were not saved: %s", error)
        finally:
            self._saving.difference_update([one.key for _, one in placed])
            with self._lock:
                self._under_way -= size

    def touch(self, keys: Sequence[str]) -> None:
        """Has the use of stored blocks noted, the most valuable last."""
        self._run(partial(self._stores.touch, keys))

    def forget(self, keys: Sequence[str]) -> None:
        """Removes blocks from all stores, also those on their way there."""
        self.wait()
        self._stores.forget(keys)

    def reset(self) -> None:
        """Forgets what was to be saved, as when the cache's memory is lost."""
        self._complete.clear()
        self._evicted.clear()

    def close(self) -> None:
        """Saves what a disk lacks of the prefix cache, waits until all is stored, and ends."""
        if self._stores.disk is not None:
            for group in self._groups:
                for block, content in pool_of(self._blocks, group).contents():
                    if content.digest is not None:
                        self._complete[group, content.digest] = block
            end = time.monotonic() + _LAST_SECONDS
            self.save_complete()
            while self._complete and time.monotonic() < end:
                self.wait()
                self.save_complete()
        self._writer.shutdown()
        self.reset()
        for group in self._groups:  # they would refer to the engine in a cycle
            pool = pool_of(self._blocks, group)
            pool.on_full = pool.on_evict = ignore

    def wait(self) -> None:
        """Waits until all that was launched is stored."""
        with suppress(RuntimeError):  # as in `_run`
            self._writer.submit(lambda: None).result()
