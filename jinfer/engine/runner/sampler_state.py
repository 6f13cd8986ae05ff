"""Sampler states: the sampling metadata of an engine's requests, and how far each sampler is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jinfer.engine.runner.device_state import SamplingRow, State
from jinfer.engine.runner.flat_batch import padded
from jinfer.engine.runner.in_flight import CallInFlight
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.sampling.logits_processors import Extra, bits, processors_of, union
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.sampling.sampling_metadata import SamplerState


@dataclass(eq=False)
class SamplerStates:
    """The sampler states of all running requests.

    Attributes:
        choices: sampling parameters by request, as rows of the device state.
    """

    choices: dict[int, SamplingRow] = field(default_factory=dict)
    _progress: dict[int, tuple[SamplerState, int, int]] = field(default_factory=dict)

    def note(self, request: int, launched: CallInFlight, step: int, row: int) -> None:
        """Records the output that has a request's state after the token that was read last."""
        self._progress[request] = (launched.output.progress, step, row)

    def has_ended(self, sequence: RunningSequence) -> bool:
        """Whether the last token that was read has ended a running sequence on the device."""
        if sequence.block_tables is None or len(sequence.tokens) == len(sequence.request.prompt):
            return False
        ends = np.asarray(self.choices[sequence.request.id].sampler.end_ids)
        return not sequence.request.sampling.ignore_eos and bool(
            np.any(ends == sequence.tokens[-1])
        )

    def forget(self, request: int) -> None:
        """Drops an ended request."""
        self.choices.pop(request, None)
        self._progress.pop(request, None)

    def clear(self) -> None:
        """Drops references to arrays of the device."""
        self._progress.clear()

    def stages(self, sequences: Sequence[RunningSequence]) -> tuple[str, ...]:
        """The sampler stages of a program for these sequences."""
        plain = all(self.choices[sequence.request.id].plain for sequence in sequences)
        return sampler_sets()[0 if plain else -1]

    def extras(self, sequences: Sequence[RunningSequence]) -> tuple[Extra, ...]:
        """The extras of a program for these sequences."""
        return union(self.choices[sequence.request.id].extras for sequence in sequences)

    def row(
        self, sequence: RunningSequence, context: int, more: Sequence[int] = (), first: int = 0
    ) -> State:
        """The device state's row of a sequence, in NumPy.

        Args:
            context: length of `State.history`.
            more: tokens that may follow it.
            first: index of its first token that the device holds.
        """
        request, choice = sequence.request, self.choices[sequence.request.id]
        tokens = [*sequence.inputs[first:], *more]
        counts = (len(tokens), len(request.prompt) - first, sequence.limit, len(request.encoder))
        mask = choice.mask if sequence.must is None else _only(sequence.must, len(choice.mask))
        parts: Any = (
            padded(tokens, context)[None],
            *(np.array([count], np.int32) for count in counts),
            np.zeros(1, np.bool_),
            np.array([choice.logprobs]),
            choice.sampler,
            self._progress_of(sequence, len(more)),
            mask[None],
            np.array([choice.masked or sequence.must is not None]),
            np.array([bits(processors_of(choice.extras))], np.int32),
            np.array(["post_sampling_probs" in choice.extras]),
            choice.logprob_ids[None],
        )
        return State(*parts)

    def _progress_of(self, sequence: RunningSequence, more: int) -> SamplerState:
        """Its sampler's state after the tokens that were read."""
        known = self._progress.get(sequence.request.id)
        if known is None:
            progress = self.choices[sequence.request.id].progress
        else:
            each, step, row = known
            progress = jax.tree.map(lambda part: np.asarray(part)[step, row][None], each)
        # Tokens that a grammar forced, and no sampler drew, count too.
        count = len(sequence.tokens) + more - len(sequence.request.prompt)
        drawn: Any = np.array([count], np.int32)
        return progress._replace(drawn=drawn)


def _only(id: int, words: int) -> np.ndarray:
    """A bitmask that allows one token."""
    mask = np.zeros(words, np.uint32)
    mask[id // 32] = 1 << id % 32
    return mask
