"""What an engine does at a moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What an engine does at a moment.

    Attributes:
        running, waiting: requests.
        blocks, blocks_held: of the cache, those of all groups together.
        preemptions: so far.
        prompt_tokens, cached_tokens, new_tokens: so far; cached ones were not computed again.
        compilations: programs compiled, or taken from the persistent cache.
        drafts, draft_tokens, accepted_tokens: trees that were verified so far, their tokens, and
            those of them that were right.
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
