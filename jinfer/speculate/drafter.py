"""Drafters: the interface of draft sources in speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jinfer.engine.engine import Engine
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.loader.open_model import Opened
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.speculate.token_tree import TokenTree


class Drafter:
    """Proposes tokens that may follow a sequence, all of whose tokens are known.

    Drafts decide how fast tokens come, and never which.

    Attributes:
        name: draft source of its nodes, if all have the same one.
        seconds_per_level: time of a level of a draft; 0 if negligible.
    """

    name: str = ""
    seconds_per_level: float = 0.0

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        """Drafts a tree for each sequence; an empty one if it has no proposal.

        Args:
            requests: sequences, and the maximum depth of each one's tree.
        """
        raise NotImplementedError

    def forget(self, sequence: RunningSequence) -> None:
        """Drops the state of a request that has ended."""

    def announce(self) -> list[Future[Program]]:
        """Starts compiling all programs that it may need."""
        return []

    def reset(self) -> None:
        """Discards device state after a failed step."""

    def release(self) -> None:
        """Frees memory; nothing is drafted afterwards."""


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is made from.

    Attributes:
        engine: the engine that it drafts for, the target.
        opened: the target's model.
        entry: the entry of `[speculation] draft`.
        model: the model that it drafts with; None if it needs none.
        load: functions that load draft weights, called after the target's; takes `progress`.
    """

    engine: Engine
    opened: Opened
    entry: DraftSpec
    model: Opened | None
    load: list[Callable[[bool], None]]

    @property
    def draft_model(self) -> Opened:
        """The model that it drafts with."""
        assert self.model is not None, "this draft source opens one"
        return self.model
