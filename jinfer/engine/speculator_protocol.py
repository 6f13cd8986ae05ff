"""What an engine asks of who drafts tokens for it; see `jinfer.speculate`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.in_flight import Launched
from jinfer.engine.scheduling.scheduler import Plan, Running
from jinfer.engine.search.guided_decoding import Guides


class Speculator(Protocol):
    """Drafts tokens, so that one call gives several."""

    def announce(self, engine: EngineCore) -> list[Future[Program]]:
        """Starts to compile all programs that it may need."""
        ...

    def waits(self, sequences: Sequence[Running]) -> bool:
        """Whether all tokens have to be known before the next call is planned."""
        ...

    def steps(self, most: int) -> int:
        """Tokens that a call without drafts may compute of each sequence."""
        ...

    def launch(self, engine: EngineCore, plan: Plan, guides: Guides) -> bool:
        """Launches a call that verifies drafts for what is planned; False: there are none."""
        ...

    def read(
        self, engine: EngineCore, launched: Launched, sequence: Running, ids: list[int]
    ) -> list[str]:
        """Is told the new tokens of a sequence, before they become its; who drafted the first."""
        ...

    def drop(self, engine: EngineCore, sequence: Running) -> None:
        """A sequence is about to give its blocks back."""
        ...

    def end(self, sequence: Running) -> None:
        """A request has ended."""
        ...

    def reset(self) -> None:
        """A step failed: what the device had may be lost."""
        ...

    def release(self) -> None:
        """Gives memory back; nothing is drafted afterwards."""
        ...
