"""Engine statistics: requests, KV-cache blocks, token counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """State and totals of an engine.

    Attributes:
        running, waiting: number of requests.
        blocks, blocks_held: KV-cache blocks of all groups, and those in use.
        preemptions: number of preemptions so far.
        prompt_tokens, cached_tokens, new_tokens: totals so far; cached prompt tokens were found in
            the prefix cache.
        compilations: programs compiled, or loaded from the persistent cache.
        saved_blocks, saved_bytes: that prefix cache offload has taken to host memory or disk.
        restored_blocks, restored_bytes: that it has brought back to the device.
        lost_blocks: that were to come back, but were damaged, or had gone.
        offload_ram_bytes, offload_disk_bytes: of the blocks that it has now.
        drafts, draft_tokens, accepted_tokens: draft trees verified so far, their tokens, and the
            accepted ones.
    """

    running: int
    waiting: int
    blocks: int
    blocks_held: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    compilations: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    restored_blocks: int = 0
    restored_bytes: int = 0
    lost_blocks: int = 0
    offload_ram_bytes: int = 0
    offload_disk_bytes: int = 0


@dataclass
class DraftCounts:
    """Counts of an engine's drafts so far.

    Attributes:
        drafts: trees that were verified.
        drafted, accepted: their tokens, and those that were accepted.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
