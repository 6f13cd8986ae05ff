"""What an engine asks of who drafts tokens for it; see `jinfer.speculate`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.in_flight import Launched
from jinfer.engine.scheduling.scheduler import Plan, Running

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine


@dataclass
class Drafted:
    """Counts of an engine's drafts so far.

    Attributes:
        drafts: trees that were verified.
        drafted, accepted: their tokens, and those that were right.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


class Speculator(Protocol):
    """Drafts tokens, so that one call gives several."""

    def announce(self, engine: Engine) -> list[Future[Program]]:
        """Starts to compile all programs that it may need."""
        ...

    def waits(self, sequences: Sequence[Running]) -> bool:
        """Whether all tokens have to be known before the next call is planned."""
        ...

    def steps(self, most: int) -> int:
        """Tokens that a call without drafts may compute of each sequence."""
        ...

    def launch(self, engine: Engine, plan: Plan) -> bool:
        """Launches a call that verifies drafts for what is planned; False: there are none."""
        ...

    def read(
        self, engine: Engine, launched: Launched, sequence: Running, ids: list[int]
    ) -> list[str]:
        """Is told the new tokens of a sequence, before they become its; who drafted the first."""
        ...

    def drop(self, engine: Engine, sequence: Running) -> None:
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
