"""Step plan: what one call of the device computes, and how prompts share its token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinfer.engine.scheduling.block_manager import BlockCopy
from jinfer.engine.scheduling.sequence import RunningSequence


@dataclass(frozen=True)
class PrefillChunk:
    """Chunked prefill: a range of a sequence's known tokens that one step computes.

    Attributes:
        start, count: position of the first token, number of tokens.
        samples: whether a new token is sampled after the last one.
    """

    sequence: RunningSequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What one call of the device computes.

    Attributes:
        admitted: sequences that get a slot first.
        copies: blocks to copy first.
        chunks: chunks of prompts.
        decoding: sequences that get their next token.
        steps: new tokens of each of those, at most; 1 with chunks, or if a sequence is guided
            or has no new token yet.
        must_read: nothing can be planned before the results of earlier calls are read.
    """

    admitted: tuple[RunningSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decoding: tuple[RunningSequence, ...] = ()
    steps: int = 1
    must_read: bool = False

    @property
    def has_images(self) -> bool:
        """Whether images change more than the offsets of rotary positions."""
        return any(
            c.sequence.request.images is not None
            and c.sequence.request.images.changes(c.start, c.start + c.count)
            for c in self.chunks
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.chunks or self.decoding)


def split_budget[T](needed: Sequence[tuple[T, int]], budget: int) -> list[tuple[T, int]]:
    """Divides a token budget: half to the first prompt, the rest to those that want least.

    Prompts of equal lengths are finished one after the other, which halves the mean time to first
    token of prompts that came together. A short prompt does not wait for a long one, and the oldest
    does not starve.

    Args:
        wanted: (prompt, tokens that it still wants), the first in line first.
    """
    counts = dict.fromkeys(range(len(needed)), 0)
    if needed and budget > 0:
        counts[0] = min(needed[0][1], -(-budget // 2))
        budget -= counts[0]
    for i in sorted(counts, key=lambda i: needed[i][1] - counts[i]):
        more = min(needed[i][1] - counts[i], budget)
        counts[i] += more
        budget -= more
    return [(one, counts[i]) for i, (one, _) in enumerate(needed) if counts[i]]
