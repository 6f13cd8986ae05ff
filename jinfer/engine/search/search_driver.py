"""Search drivers: protocol of beam search and contrastive search, which run on the host."""

from __future__ import annotations

from typing import Protocol

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduling.sequence import RunningSequence


class SearchDriver(Protocol):
    """Computes the tokens of one host-driven sequence, step by step."""

    def advance(self, engine: EngineCore, sequence: RunningSequence) -> list[Token | Failed]:
        """Computes the next tokens of the sequence, which is prefilled but for its last token."""

    def release_blocks(self, engine: EngineCore) -> None:
        """Frees the blocks of the search: its request has ended, or is preempted.

        After a preemption the search restarts from the known tokens.
        """
