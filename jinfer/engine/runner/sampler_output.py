"""Sampler output: the new tokens of a call, and how many steps a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax import Array

from jinfer.sampling.sampling_metadata import SamplerState

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_STEPS = 8  # of a call of `decode`
# Seconds: a call takes as many steps as fit, so that the host has little to do with a small model's
# short steps. A new request or a cancellation interrupts the call on a CPU; elsewhere it waits for
# two calls at most.
CALL_SECONDS = 0.04
# The same where other processes compute on these cores: a call may take several times as long as
# the last one, and its tokens come together.
CONTENDED_CALL_SECONDS = 0.02
MAX_COPIES = 8  # of a call of `copy_blocks`


class SamplerOutput(NamedTuple):
    """Sampled tokens, a row for each sequence.

    Attributes:
        tokens: token ids; -1: none; `NOT_FINITE`: none, because logits are NaN or +inf.
        logprob, top_ids, top_logprobs: log-probability of each token, and the likeliest tokens with
            theirs; undefined if not wanted.
        progress: the samplers' state after these tokens.
    """

    tokens: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]
    progress: SamplerState


def steps_that_fit(step_seconds: float, contended: bool) -> int:
    """Number of steps that fit into a call, from the seconds of a step."""
    seconds = CONTENDED_CALL_SECONDS if contended else CALL_SECONDS
    return max(1, int(seconds / max(step_seconds, 1e-6)))
