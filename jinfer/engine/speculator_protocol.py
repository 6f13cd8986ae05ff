"""Speculative decoding, protocol: how the engine calls it; implemented in `jinfer.speculate`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.in_flight import CallInFlight
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.engine.search.guided_decoding import Guides


class Speculator(Protocol):
    """Drafts tokens, so that one call gives several tokens of a sequence."""

    def announce(self, engine: EngineCore) -> list[Future[Program]]:
        """Starts compiling all programs that it may need."""

    def needs_tokens(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether all tokens of the sequences have to be read before the next call is planned."""

    def max_steps(self, most: int) -> int:
        """Steps that a call without drafts may take."""

    def launch(self, engine: EngineCore, plan: StepPlan, guides: Guides) -> bool:
        """Launches a call that verifies drafts for the planned sequences; False: there are none."""

    def observe(
        self, engine: EngineCore, launched: CallInFlight, sequence: RunningSequence, ids: list[int]
    ) -> list[str]:
        """Observes the new tokens of a sequence before they are appended.

        Returns:
            The draft source of each accepted token, which are the first ones.
        """

    def release_blocks(self, engine: EngineCore, sequence: RunningSequence) -> None:
        """Releases blocks of a sequence's drafts, before the sequence's own are freed."""

    def forget(self, sequence: RunningSequence) -> None:
        """Drops the state of a request that has ended."""

    def reset(self) -> None:
        """Discards device state after a failed step."""

    def release(self) -> None:
        """Frees memory; nothing is drafted afterwards."""
