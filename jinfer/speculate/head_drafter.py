"""EAGLE/MTP heads: a few layers that draft from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.model_runner import padded
from jinfer.engine.runner.step_key import StepKey, StepKind
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.ops.attention.kv_cache import Cache
from jinfer.speculate.draft_model import DraftModel


@dataclass(eq=False, kw_only=True)
class HeadDrafter(DraftModel):
    """Drafts with a head that reads the target's hidden states.

    It reads the tokens from the second one on, each with the target's hidden states of the token
    before. Those are in the target's KV cache, so that prefix-cached tokens have them too.
    """

    first: ClassVar[int] = 1
    kinds: ClassVar[tuple[StepKind, StepKind]] = "prefill_head", "propose_with_head"

    def _after(self, sequence: RunningSequence, chain: list[int]) -> list[int]:
        # Drafted tokens were computed from the head's own hidden states, so they do not count.
        return sequence.tokens[1:]

    def _prefill(
        self, rows: np.ndarray, positions: np.ndarray, tables: dict[str, np.ndarray]
    ) -> Cache:
        arguments = (rows, positions, tables, self._vectors(rows, positions))
        program = self.programs.get(StepKey("prefill_head", len(rows)))
        return program(self.leaves, self.cache, self.state, *arguments)

    def _hidden(self, sequences: Sequence[RunningSequence], rows: np.ndarray) -> Sequence[Any]:
        positions = padded([len(s.tokens) - 2 for s in sequences], len(rows), -1)
        return (self._vectors(rows, positions),)

    def _vectors(self, rows: np.ndarray, positions: np.ndarray) -> Any:
        """The target's hidden states of some tokens."""
        target = self.target
        program = target.programs.get(StepKey("gather_taps", len(rows)))
        arguments = (rows, positions, target.slot_tables())
        vectors = program(target.programs.hidden_taps(target.cache), *arguments)
        if self.programs.device is None:
            return vectors
        return jax.device_put(vectors, self.programs.device)

    def announce(self) -> list[Future[Program]]:
        keys = [*self._step_keys()]
        counts = sorted({key.tokens for key in keys if key.tokens})
        taps = self.target.programs.announce(StepKey("gather_taps", count) for count in counts)
        return [*self.programs.announce(keys), *taps]
