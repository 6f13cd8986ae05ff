"""Search drivers: protocol of beam search and contrastive search, which run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduling.sequence import RunningSequence


class SearchDriver(Protocol):
    """Computes the tokens of host-driven sequences, one step at a time."""

    def read_results(self, engine: EngineCore) -> list[Token | Failed]:
        """Reads the results of its calls in flight."""
        ...

    def advance(
        self, engine: EngineCore, sequences: Sequence[RunningSequence]
    ) -> list[Token | Failed]:
        """Computes the next tokens of its sequences, which are prefilled but for the last token."""
        ...

    def release_blocks(self, engine: EngineCore, request: int) -> None:
        """Frees the blocks of a request's search: it has ended, or is preempted.

        After a preemption the search restarts from the known tokens.
        """
        ...

    def forget(self, request: int) -> None:
        """Drops the state of a request that has ended."""
        ...
