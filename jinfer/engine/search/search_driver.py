"""Sequences whose tokens the host chooses or watches: what an engine asks of who drives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduling.scheduler import Running


class Driver(Protocol):
    """What drives sequences whose tokens the host has to choose or to watch, one by one."""

    def settle(self, engine: EngineCore) -> list[Token | Failed]:
        """Reads what it launched before: afterwards none of its tokens is unread."""
        ...

    def advance(self, engine: EngineCore, sequences: Sequence[Running]) -> list[Token | Failed]:
        """Computes the next tokens of sequences whose last token alone is yet to be computed."""
        ...

    def drop(self, engine: EngineCore, request: int) -> None:
        """Gives back what a request holds beside its sequence's blocks: it ended, or is preempted.

        After a preemption it starts again from the tokens that are known.
        """
        ...

    def end(self, request: int) -> None:
        """Forgets a request that has ended."""
        ...
