"""What steps give, and how many there are in a call."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int

from jinfer.sampling.rows import Progress

MAX_STEPS = 8  # of a call of `decode`
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
