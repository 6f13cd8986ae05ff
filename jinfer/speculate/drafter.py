"""Who drafts: what speculation asks of each source of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.scheduling.scheduler import Running
from jinfer.speculate.token_tree import Tree


class Drafter:
    """Proposes what may follow a sequence, all of whose tokens are known.

    What it proposes decides how fast tokens come, and never which.

    Attributes:
        name: what its nodes are said to be from, where all are from one source.
        seconds: what a level of a draft takes; 0 where that does not count.
    """

    name: str = ""
    seconds: float = 0.0

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """A tree for each sequence, of at most so many levels; an empty one where it knows none."""
        raise NotImplementedError

    def end(self, sequence: Running) -> None:
        """A request has ended."""

    def announce(self) -> list[Future[Program]]:
        """Starts to compile all programs that it may need."""
        return []

    def reset(self) -> None:
        """A step failed: what the device had may be lost."""

    def release(self) -> None:
        """Gives memory back; nothing is drafted afterwards."""
