"""The sampler as custom calls: the stages of `jinfer.sampling` on each row by itself.

A row's token depends on its logits, parameters, progress and history alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from jinfer.cpu import build


def available() -> bool:
    """Whether the custom calls exist on this machine; compiles them the first time."""
    return build.register("jinfer_choose", "jinfer_filter", "jinfer_logprobs")


def choose(
    logits: Float[Array, "rows vocab"],
    parameters: Sequence[Array],
    history: Int[Array, "slots length"],
    slots: Int[Array, " rows"],
    lengths: Int[Array, " slots"],
    prompts: Int[Array, " slots"],
    masks: tuple[UInt[Array, "slots words"], Bool[Array, " slots"]] | None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The next token of each row, and mirostat's mu after it; see `jinfer.sampling.sampler.sample`.

    Args:
        logits: float32.
        parameters: of each slot: what `Sampler` and `Progress` have, in their order.
        masks: a bit per token that is allowed, and which slots obey theirs.
    """
    results = [jax.ShapeDtypeStruct(logits.shape[:1], kind) for kind in (np.int32, np.float32)]
    given = (history, lengths, prompts, slots, slots, *(masks or ()))
    tokens, mu = jax.ffi.ffi_call("jinfer_choose", results)(logits, *parameters, *given)
    return tokens, mu


def left(
    logits: Float[Array, "rows vocab"],
    parameters: Sequence[Array],
    history: Int[Array, "slots length"],
    slots: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
    prompts: Int[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """What the stages leave of each row, whose number its parameters, progress and lengths have."""
    own = np.arange(logits.shape[0], dtype=np.int32)
    call = jax.ffi.ffi_call("jinfer_filter", jax.ShapeDtypeStruct(logits.shape, np.float32))
    return call(logits, *parameters, history, lengths, prompts, own, slots)


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
