"""Device state: tokens, limits and sampler state of each slot, which stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.sampling.logits_processors import Extra, LogitsProcessor, extras_of
from jinfer.sampling.param_types import MAX_LOGPROBS
from jinfer.sampling.sampler_chain import is_plain
from jinfer.sampling.sampling_metadata import (
    SamplerState,
    SamplingMetadata,
    allowed_mask,
    empty_metadata,
    empty_sampler_state,
    mask_words,
    metadata_row,
    sampler_state_row,
)
from jinfer.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Int, UInt


class State(NamedTuple):
    """A row for each slot, and one more for padding.

    Attributes:
        history: tokens of each sequence, including those that are not in the KV cache yet.
        lengths: number of tokens.
        prompts: number of tokens of the prompt.
        limits: maximum number of tokens.
        encoded: tokens of the encoder's output, for cross-attention.
        ended: whether the last token ended the sequence.
        logprobs: whether log-probabilities are wanted.
        sampler, progress: sampling parameters, and the sampler's state.
        mask, masked: bitmask of the allowed tokens, and whether it applies.
        processors: bit i: the logits processor of index i is wanted.
        filtered: whether log-probabilities are those after the samplers.
        logprob_ids: tokens whose log-probabilities are wanted, then -1; none: the likeliest.
    """

    history: Int[Array, "rows context"]
    lengths: Int[Array, " rows"]
    prompts: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    encoded: Int[Array, " rows"]
    ended: Bool[Array, " rows"]
    logprobs: Bool[Array, " rows"]
    sampler: SamplingMetadata
    progress: SamplerState
    mask: UInt[Array, "rows words"]
    masked: Bool[Array, " rows"]
    processors: Int[Array, " rows"]
    filtered: Bool[Array, " rows"]
    logprob_ids: Int[Array, "rows top"]


def empty_state(slots: int, context: int, vocab: int) -> State:
    """A device state with all slots free."""
    rows = slots + 1

    # A separate array for each field: the state is donated to every step, and no buffer can be
    # donated twice. Made from NumPy arrays, as `jnp.zeros` would trace a program for each.
    def zeros(dtype: DTypeLike, *shape: int) -> Array:
        return jax.device_put(np.zeros((rows, *shape), dtype), may_alias=False)

    return State(
        history=zeros(np.int32, context),
        lengths=zeros(np.int32),
        prompts=zeros(np.int32),
        limits=zeros(np.int32),
        encoded=zeros(np.int32),
        ended=zeros(np.bool_),
        logprobs=zeros(np.bool_),
        sampler=empty_metadata(rows),
        progress=empty_sampler_state(rows),
        mask=zeros(np.uint32, mask_words(vocab)),
        masked=zeros(np.bool_),
        processors=zeros(np.int32),
        filtered=zeros(np.bool_),
        logprob_ids=zeros(np.int32, MAX_LOGPROBS),
    )


@dataclass(frozen=True)
class SamplingRow:
    """Sampling parameters of a request as a row of the device state, in NumPy.

    Attributes:
        sampler, progress: rows of `State.sampler` and `State.progress`, the latter initial.
        logprobs: whether log-probabilities are wanted.
        mask, masked: bitmask of the allowed tokens, and whether it applies.
        plain: whether the common sampling stages are enough.
        extras: the outputs that it requests in addition to its stages.
        logprob_ids: tokens whose log-probabilities are wanted, then -1.
    """

    sampler: SamplingMetadata
    progress: SamplerState
    logprobs: bool
    mask: UInt[np.ndarray, " words"]
    masked: bool
    plain: bool
    extras: tuple[Extra, ...]
    logprob_ids: Int[np.ndarray, " top"]

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        end_ids: Iterable[int],
        vocab: int,
        encode: Callable[[str], Sequence[int]] | None,
        processors: tuple[LogitsProcessor, ...] = (),
    ) -> SamplingRow:
        """From a request's parameters.

        Args:
            end_ids: the model's end-of-sequence tokens.
            vocab: size of the vocabulary.
            encode: token ids of a text, without special tokens; None without a tokenizer.
            processors: logits processors.

        Raises:
            ValueError: a parameter that does not fit the model.
        """
        mask = allowed_mask(params, vocab)
        ids = params.logprob_token_ids
        if beyond := [id for id in ids if id >= vocab]:
            raise ValueError(
                f"logprob_token_ids: token {beyond[0]} is outside the vocabulary of {vocab}"
            )
        return cls(
            metadata_row(params, end_ids, vocab, encode),
            sampler_state_row(params),
            params.logprobs is not None,
            np.zeros(mask_words(vocab), np.uint32) if mask is None else mask,
            mask is not None,
            is_plain(params),
            extras_of(params, processors),
            np.array([*ids, *[-1] * (MAX_LOGPROBS - len(ids))], np.int32),
        )


def set_slot(state: State, row: State, slot: Int[Array, ""]) -> State:
    """The device state with a sequence's row in a slot."""
    return jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, slot, 0), state, row
    )
