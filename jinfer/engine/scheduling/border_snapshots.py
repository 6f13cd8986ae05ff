"""Border snapshots: which recurrent states a prompt's steps copy on their way, for later prompts.

A border is the end of a whole block of tokens; border j is after `BLOCK` j tokens. A step that
comes past a border can copy the state there (`jinfer.ops.recurrence.sequence_runs`), at the cost of
the copy alone. Where later prompts part from this one shows only when they come, so states are
copied at all borders, or, of a prompt with more than its share of the snapshots, at fewer, the
later the further apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.engine.scheduling.block_manager import BlockCopy, BlockManager, BlockTables
from jinfer.engine.scheduling.block_pool import chain_hash
from jinfer.engine.scheduling.state_pool import RetentionPriority, Snapshot, StatePool
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.ops.attention.kv_cache import BLOCK


def plan_borders(
    blocks: BlockManager, tables: BlockTables, tokens: Sequence[int], computed: int
) -> None:
    """Chooses the borders of a sequence to copy states at, of the tokens still to be computed."""
    tables.borders.clear()
    if (states := blocks.states) is None or not states.limit:
        return
    first, last = computed // BLOCK + 1, len(tokens) // BLOCK
    chosen = dict.fromkeys(spread(first, last, states.share), RetentionPriority.PASSED)
    chosen |= dict.fromkeys(((len(tokens) - 1) // BLOCK, last), RetentionPriority.ENDED)
    chosen[_known_blocks(states, tokens, tables.seed)] = RetentionPriority.SHARED
    tables.borders |= {border: priority for border, priority in chosen.items() if border >= first}


def spread(first: int, last: int, limit: int) -> list[int]:
    """Borders from `first` to `last`, at most `limit`: those with the fewest significant bits.

    With p bits they are 2 ** (1 - p) of the way apart, so that much is computed again at most.
    """
    chosen: list[int] = []
    for bits in range(last.bit_length(), 0, -1):
        borders = range(first, last + 1)
        chosen = [j for j in borders if (j // (j & -j)).bit_length() <= bits]
        if len(chosen) <= limit:
            break
    return chosen[-limit:]


def _known_blocks(states: StatePool, tokens: Sequence[int], seed: bytes) -> int:
    """Whole blocks that some prompt or answer has begun with before."""
    digest, count = seed, 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest = chain_hash(digest, tokens[end - BLOCK : end])
        if not states.was_seen(digest):
            break
        count += 1
    return count


def reserve_borders(blocks: BlockManager, tables: BlockTables, start: int, end: int) -> None:
    """Before a step computes tokens start .. end - 1: blocks for the states that it copies."""
    for border in [j for j in tables.borders if start < j * BLOCK <= end]:
        assert blocks.states is not None, "it has states"
        block = blocks.states.allocate()
        if block is None:
            break
        tables.copies[border] = block


def keep_borders(blocks: BlockManager, tables: BlockTables) -> None:
    """After the step was launched and its tokens registered: the copies become snapshots."""
    for border, block in tables.copies.items():
        assert blocks.states is not None, "it has states"
        snapshot = Snapshot(tables.digests[border], ())
        blocks.states.keep_snapshot(block, snapshot, tables.borders.pop(border))
    tables.copies.clear()


def copies_for_waiting(blocks: BlockManager, plan: StepPlan) -> list[BlockCopy]:
    """Copies of the states at the ends of chunks from where waiting prompts go on."""
    copies: list[BlockCopy] = []
    for sequence in (chunk.sequence for chunk in plan.chunks):
        if sequence.computed in sequence.snapshots and sequence.block_tables is not None:
            known = sequence.cache_ids[: sequence.computed]
            copies += blocks.snapshot(sequence.block_tables, known)
    return copies
