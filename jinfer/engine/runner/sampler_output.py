"""What steps give, and how many there are in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax import Array

from jinfer.sampling.sampling_metadata import Progress

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_STEPS = 8  # of a call of `decode`
# A call takes as many steps as fit into this, in seconds, so that the host has little to do with a
# small model's short steps. What is new, a request or a wish to stop, interrupts it on a CPU, and
# waits no longer than two calls elsewhere.
CALL_SECONDS = 0.04
MAX_COPIES = 8  # of a call of `copy_blocks`


class Chosen(NamedTuple):
    """New tokens, a row for each sequence that got one.

    Attributes:
        tokens: -1 where there is none.
        logprob, top_ids, top_logprobs: where they are wanted, else anything.
        progress: of the samplers, after these tokens.
    """

    tokens: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]
    progress: Progress


def fitting(step_seconds: float) -> int:
    """The steps of a call, each of which takes so long."""
    return max(1, int(CALL_SECONDS / max(step_seconds, 1e-6)))
