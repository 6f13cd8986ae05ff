"""The sampler as custom calls: the stages of `jinfer.sampling` on each row by itself.

A row's token depends on its logits, parameters, progress and history alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def available() -> bool:
    """Whether the custom calls exist on this machine; compiles them the first time."""
    return build_library.register("jinfer_choose", "jinfer_logprobs")


def choose(
    logits: Float[Array, "rows vocab"],
    parameters: Sequence[Array],
    history: Int[Array, "slots length"],
    lengths: Int[Array, " requests"],
    prompts: Int[Array, " requests"],
    owners: Int[Array, " rows"],
    slots: Int[Array, " rows"],
    masks: Sequence[Array] = (),
    *,
    left: bool = False,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, "some vocab"]]:
    """The next token of each row; see `jinfer.sampling.sampler.sample`.

    Args:
        logits: float32.
        parameters: of each request: what `Sampler` and `Progress` have, in their order.
        history, lengths, prompts: tokens of sequences; of each request how many there are, and how
            many of them were given.
        owners, slots: of each row, its request and the row of `history` that has its sequence.
        masks: of each request, a bit per token that is allowed, and whether it obeys them.
        left: whether it is wanted what the stages leave of the logits.

    Returns:
        The tokens, mirostat's mu after them, and what is left, in no rows if that is not wanted.
    """
    rows, vocab = logits.shape
    results = [
        jax.ShapeDtypeStruct((rows,), np.int32),
        jax.ShapeDtypeStruct((rows,), np.float32),
        jax.ShapeDtypeStruct((rows if left else 0, vocab), np.float32),
    ]
    given = (*parameters, history, lengths, prompts, owners, slots, *masks)
    tokens, mu, rest = jax.ffi.ffi_call("jinfer_choose", results)(logits, *given)
    return tokens, mu, rest


def log_probabilities(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, " rows"],
    wanted: Bool[Array, " rows"],
    top: int,
) -> tuple[Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """As `jinfer.sampling.logprobs` has them; zeros in rows where they are not wanted.

    Args:
        logits: float32.
    """
    rows = logits.shape[0]
    shapes = ((rows,), np.float32), ((rows, top), np.int32), ((rows, top), np.float32)
    results = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    own, ids, values = jax.ffi.ffi_call("jinfer_logprobs", results)(logits, tokens, wanted)
    return own, ids, values
