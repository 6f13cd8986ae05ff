"""Prefix cache offload: cached blocks beyond the device, in host memory and on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jinfer.engine.offload.block_io import transfer_steps
from jinfer.engine.offload.block_restorer import BlockRestorer
from jinfer.engine.offload.block_saver import BlockSaver
from jinfer.engine.offload.disk_store import DiskStore
from jinfer.engine.offload.offload_stores import HostStore, Stores, block_key
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.program_cache import code_version, surroundings
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.version import __version__

if TYPE_CHECKING:
    from jinfer.engine.runner.model_runner import ModelRunner
    from jinfer.engine.scheduling.scheduler import Scheduler

_UNDER_WAY = 256 << 20  # bytes on their way to a store, at most
_SHARE = 4  # of host memory's bytes, at most this part of them


class PrefixOffload:
    """Saves an engine's blocks and restores them. All methods are called on its thread."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, ram: int, disk: DiskStore | None
    ) -> None:
        """Connects to the engine's block pools and its scheduler.

        Args:
            ram: bytes of host memory, those on their way there included; 0: none is used.
            disk: None: there is none.
        """
        under_way = min(_UNDER_WAY, ram // _SHARE) if ram else _UNDER_WAY
        host = HostStore(ram - under_way) if ram else None
        self.stores = Stores(host, disk)
        self._groups = row_groups(runner.model.caches)
        self._saver = BlockSaver(runner, scheduler, self.stores, under_way)
        self._restorer = BlockRestorer(runner, scheduler, self.stores)
        runner.before_call = self._saver.save_evicted
        scheduler.fetching = self._restorer.fetching
        runner.programs.announce(transfer_steps())

    def stats(self) -> dict[str, int]:
        """Its fields of `Stats`; any thread may ask."""
        counts, host, disk = self.stores.counts, self.stores.host, self.stores.disk
        return {
            "saved_blocks": counts.saved,
            "saved_bytes": counts.saved_bytes,
            "restored_blocks": counts.restored,
            "restored_bytes": counts.restored_bytes,
            "lost_blocks": counts.lost,
            "offload_ram_bytes": 0 if host is None else host.nbytes,
            "offload_disk_bytes": 0 if disk is None else disk.nbytes,
        }

    def begin_step(self) -> None:
        """Restores what has come from the stores."""
        self._restorer.restore()

    def end_step(self, *, idle: bool) -> None:
        """Saves what has become complete.

        Args:
            idle: whether the step had nothing to do, so that it may wait a moment.
        """
        self._saver.save_complete()
        if idle:
            self._restorer.wait()

    def finish(self, sequence: RunningSequence) -> None:
        """Notes which blocks a sequence that ends has used."""
        self._restorer.forget(sequence)
        if sequence.block_tables is not None and sequence.request.reuse:
            used = reversed(sequence.block_tables.digests[1:])
            self._saver.touch([block_key(g, d) for d in used for g in self._groups])

    def forget(self, blocks: Iterable[tuple[str, bytes]]) -> None:
        """Remove blocks, given as group and hash, from all stores."""
        self._saver.forget([block_key(*one) for one in blocks])

    def reset(self) -> None:
        """After the cache's memory was lost: nothing of it can be saved any more."""
        self._saver.reset()
        self._restorer.reset()

    def weights_changed(self) -> None:
        """Drops all that other weights have computed; nothing goes to disk any more."""
        self.reset()
        self._saver.wait()
        if self.stores.host is not None:
            self.stores.host.clear()
        self.stores.disk = None

    def close(self) -> None:
        """Saves what a disk lacks, and ends the threads."""
        self._restorer.close()
        self._saver.close()
        if self.stores.host is not None:
            self.stores.host.clear()


_FORMAT = 1  # change where the same block would get other bytes
# Packages that read and convert weights, and divide models among devices.
_OTHER_UNITS = ("loader", "parallel")


def cache_identity(programs: CompiledPrograms, weights: str) -> str:
    """A digest that is equal only where the same tokens give the same bytes in a block.

    Args:
        weights: what the weights were read from, and how they are stored.
    """
    made_with = (
        *(_FORMAT, BLOCK, __version__, code_version(*_OTHER_UNITS), surroundings(), weights),
        *(programs.model.described(), repr(programs.sizes.kv_cache), programs.abstract_rows(1)),
    )
    return hashlib.sha256(repr(made_with).encode()).hexdigest()
