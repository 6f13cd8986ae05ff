"""What the device keeps of the sequences that run: their tokens, their limits, their samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.sampling.sampler_chain import is_plain
from jinfer.sampling.sampling_metadata import (
    Progress,
    Sampler,
    allowed_mask,
    empty_progress,
    empty_sampler,
    mask_words,
    progress_row,
    sampler_row,
)
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.xla.device import put

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Int, UInt


class State(NamedTuple):
    """A row for each slot, and one more that padding uses.

    Attributes:
        history: the tokens of each sequence, those included that are not in the cache yet.
        lengths: how many of them there are.
        prompts: how many of them were asked.
        limits: how many there may be in the end.
        encoded: tokens of the encoder's output that each sequence sees.
        ended: whether the last token ended the sequence.
        logprobs: whether log-probabilities are wanted.
        sampler, progress: how the next token is chosen.
        mask, masked: a bit for each token that may be chosen, and whether it counts.
    """

    history: Int[Array, "rows context"]
    lengths: Int[Array, " rows"]
    prompts: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    encoded: Int[Array, " rows"]
    ended: Bool[Array, " rows"]
    logprobs: Bool[Array, " rows"]
    sampler: Sampler
    progress: Progress
    mask: UInt[Array, "rows words"]
    masked: Bool[Array, " rows"]


def empty_state(slots: int, context: int, vocab: int) -> State:
    """Nobody runs."""
    rows = slots + 1

    # Each its own array: the state is given away to every step, and nothing can be given twice.
    # From NumPy's, as for each that JAX makes a small program is traced.
    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return put(np.zeros(shape, dtype), may_alias=False)

    def counts() -> Array:
        return zeros((rows,), np.int32)

    def flags() -> Array:
        return zeros((rows,), np.bool_)

    return State(
        history=zeros((rows, context), np.int32),
        lengths=counts(),
        prompts=counts(),
        limits=counts(),
        encoded=counts(),
        ended=flags(),
        logprobs=flags(),
        sampler=empty_sampler(rows),
        progress=empty_progress(rows),
        mask=zeros((rows, mask_words(vocab)), np.uint32),
        masked=flags(),
    )


def state_row(
    tokens: Sequence[int],
    context: int,
    *,
    prompt: int,
    limit: int,
    encoded: int,
    choice: Choice,
    progress: Progress,
) -> State:
    """The row of one sequence, in NumPy."""
    history = np.zeros((1, context), np.int32)
    history[0, : len(tokens)] = tokens
    counts = (len(tokens), prompt, limit, encoded)
    whole: Any = (
        history,
        *(np.array([count], np.int32) for count in counts),
        np.zeros(1, np.bool_),
        np.array([choice.logprobs]),
        choice.sampler,
        progress,
        choice.mask[None],
        np.array([choice.masked]),
    )
    return State(*whole)


@dataclass(frozen=True)
class Choice:
    """How a request's tokens are chosen, as the device needs it, in NumPy.

    Attributes:
        sampler, progress: its rows, the progress at its beginning.
        logprobs: whether log-probabilities are wanted.
        mask, masked: of the tokens that are allowed, if not all are.
        plain: whether the common stages of sampling are enough.
    """

    sampler: Sampler
    progress: Progress
    logprobs: bool
    mask: UInt[np.ndarray, " words"]
    masked: bool
    plain: bool

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        end_ids: Iterable[int],
        vocab: int,
        encode: Callable[[str], Sequence[int]] | None,
    ) -> Choice:
        """From a request's parameters.

        Args:
            encode: a text's ids, without what the model wants around a text.

        Raises:
            ValueError: a parameter that does not fit the model.
        """
        mask = allowed_mask(params, vocab)
        return cls(
            sampler_row(params, end_ids, vocab, encode),
            progress_row(params),
            params.logprobs is not None,
            np.zeros(mask_words(vocab), np.uint32) if mask is None else mask,
            mask is not None,
            is_plain(params),
        )


def admit(state: State, row: State, slot: Int[Array, ""]) -> State:
    """The state with a sequence in a slot."""
    return jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, slot, 0), state, row
    )
