"""Block restorer: brings offloaded blocks of a waiting prompt's prefix back to the device.

Blocks come back into the prefix cache, unused, and the prompt is admitted as always once those that
it can begin with are there. Files are read and checked by other threads, meanwhile the engine goes
on with other requests. One prompt is served at a time: the next one may need the same blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jinfer.engine.offload.block_io import BATCH, block_nbytes, scatter
from jinfer.engine.offload.offload_stores import Stores, block_key
from jinfer.engine.scheduling.prefix_blocks import PrefixBlock, enter, pool_of, prefix_blocks
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.attention.kv_cache import BLOCK, STATE

if TYPE_CHECKING:
    from jinfer.engine.runner.model_runner import ModelRunner
    from jinfer.engine.scheduling.scheduler import Scheduler

_AHEAD = 2 * BATCH  # blocks that are read before they are written to the device
_READERS = 2
_PATIENCE = 10.0  # seconds without a block after which a prompt is computed instead
_PAUSE = 0.005  # seconds that a step waits which has nothing else to do
_log = logging.getLogger("jinfer")


@dataclass
class _Fetch:
    """The blocks of a prompt's prefix on their way to the device.

    Attributes:
        needed: all blocks of the prefix.
        waiting: those that have not been asked for.
        requested: those that have, in order.
        progress: when the last one came, or the first one was asked for, in seconds of
            `time.monotonic`.
    """

    sequence: RunningSequence
    needed: list[PrefixBlock]
    waiting: deque[PrefixBlock]
    requested: deque[tuple[PrefixBlock, Future[bytes | None]]] = field(default_factory=deque)
    progress: float = 0.0


class BlockRestorer:
    """Restores blocks for an engine. All methods are called on the engine's thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, stores: Stores) -> None:
        """Begins to look for what a disk has."""
        self._runner, self._stores = runner, stores
        self._blocks = scheduler.blocks
        self._fetches: deque[_Fetch] = deque()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="offload-read")
        self._scan: Future[None] | None = None
        if stores.disk is not None:
            self._scan = self._readers.submit(stores.disk.scan)
        abstract = runner.programs.abstract_rows(1)
        groups = row_groups(runner.model.caches)
        self._nbytes = {group: block_nbytes(abstract, group, 1) for group in groups}

    def fetching(self, sequence: RunningSequence) -> bool:
        """Whether blocks of a waiting sequence's prefix are still on their way to the device."""
        if sequence.looked_up or not sequence.request.reuse:
            return any(fetch.sequence is sequence for fetch in self._fetches)
        if self._scan is not None and not self._scan.done():
            return True
        sequence.looked_up = True
        needed = prefix_blocks(self._blocks, sequence.cache_ids, sequence.seed, self._has)
        missing = deque(one for one in needed if self._on_device(one) is None)
        if not missing:
            return False
        self._fetches.append(_Fetch(sequence, needed, missing))
        return True

    def _has(self, group: str, digest: bytes) -> bool:
        return self._stores.has(block_key(group, digest))

    def _on_device(self, one: PrefixBlock) -> int | None:
        return pool_of(self._blocks, one.group).lookup(one.digest)

    def forget(self, sequence: RunningSequence) -> None:
        """Brings no more blocks for a sequence that has ended."""
        for fetch in [fetch for fetch in self._fetches if fetch.sequence is sequence]:
            self._end(fetch)

    def reset(self) -> None:
        """Gives up all that is on its way."""
        for fetch in list(self._fetches):
            self._end(fetch)

    def close(self) -> None:
        """Ends the threads."""
        self.reset()
        self._readers.shutdown(cancel_futures=True)

    def restore(self) -> None:
        """Launches the writing of a batch of blocks that have come, if there is one."""
        while self._fetches:
            fetch = self._fetches[0]
            self._ask(fetch)
            come = list[tuple[PrefixBlock, bytes | None]]()
            while len(come) < BATCH and fetch.requested and fetch.requested[0][1].done():
                one, future = fetch.requested.popleft()
                come.append((one, future.result()))
            if come:
                fetch.progress = time.monotonic()
                whole = self._write(fetch, come)
                if whole and (fetch.waiting or fetch.requested):
                    return
            elif fetch.requested:
                if time.monotonic() < fetch.progress + _PATIENCE:
                    return
                _log.warning("offloaded blocks do not come; their prompt is computed")
            self._end(fetch)

    def wait(self) -> None:
        """Waits a moment for the next block; called where there is nothing else to do."""
        if self._scan is not None and not self._scan.done():
            wait([self._scan], timeout=_PAUSE)
        elif self._fetches and self._fetches[0].requested:
            wait([self._fetches[0].requested[0][1]], timeout=_PAUSE)

    def _ask(self, fetch: _Fetch) -> None:
        """Has the next blocks read that the device lacks."""
        while fetch.waiting and len(fetch.requested) < _AHEAD:
            one = fetch.waiting.popleft()
            if self._on_device(one) is None:
                if not fetch.requested:
                    fetch.progress = time.monotonic()
                fetch.requested.append((one, self._read(one)))

    def _read(self, one: PrefixBlock) -> Future[bytes | None]:
        key, stores = block_key(one.group, one.digest), self._stores
        content = None if stores.host is None else stores.host.get(key)
        if content is None and stores.disk is not None:
            try:
                return self._readers.submit(stores.disk.get, key, self._nbytes[one.group])
            except RuntimeError:  # the interpreter exits
                pass
        done: Future[bytes | None] = Future()
        done.set_result(content)
        return done

    def _write(self, fetch: _Fetch, come: list[tuple[PrefixBlock, bytes | None]]) -> bool:
        """Writes blocks to the device and enters them into the prefix cache.

        Returns:
            False if one was lost, or there is no room: no later one is of use.
        """
        contents: dict[str, dict[int, bytes]] = {}
        taken: list[tuple[PrefixBlock, int]] = []
        capacity = {group: self._room(fetch, group) for group in {one.group for one, _ in come}}
        whole = True
        for one, content in come:
            if self._on_device(one) is not None:
                continue
            pool = pool_of(self._blocks, one.group)
            block = pool.allocate() if content is not None and capacity[one.group] > 0 else None
            if block is None or content is None:
                self._stores.counts.lost += content is None
                whole = False
                break
            capacity[one.group] -= 1
            taken.append((one, block))
            contents.setdefault(one.group, {})[block] = content
        if not taken:
            return whole
        try:
            scatter(self._runner, contents)
        except BaseException:
            for one, block in taken:
                pool_of(self._blocks, one.group).release(block)
            raise
        for one, block in taken:
            if one.group == STATE:
                enter(self._blocks, one.group, block, one.digest, ())
            else:
                begin = one.place * BLOCK
                tokens = fetch.sequence.cache_ids[begin : begin + BLOCK]
                enter(self._blocks, one.group, block, one.before, tokens)
        counts = self._stores.counts
        counts.restored += len(taken)
        counts.restored_bytes += sum(self._nbytes[one.group] for one, _ in taken)
        return whole

    def _room(self, fetch: _Fetch, group: str) -> int:
        """Blocks that can be allocated without evicting others of the same prefix."""
        pool = pool_of(self._blocks, group)
        own = (self._on_device(one) for one in fetch.needed if one.group == group)
        return pool.available - sum(block is not None and pool.is_idle(block) for block in own)

    def _end(self, fetch: _Fetch) -> None:
        """Ends a fetch; its prompt can be admitted. The prefix stays cached longest."""
        for _, future in fetch.requested:
            future.cancel()
        self._fetches.remove(fetch)
        for one in reversed(fetch.needed):
            if (block := self._on_device(one)) is not None:
                pool_of(self._blocks, one.group).touch(block)
