"""Forward pass of one whole text, causal or bidirectional, without an engine.

All tokens are computed at once. Traced for `backend.DIFFERENTIABLE` it consists of differentiable
operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jinfer.nn.activation_taps import ActivationTaps
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.projections import Embedding
from jinfer.nn.transformer import Model
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    ENCODER,
    AttentionMetadata,
    CacheShapes,
    StateShape,
    zero_cache,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Text(NamedTuple):
    """One text.

    Attributes:
        tokens: its ids, maybe with padding at the end.
        length: tokens without padding.
        types: token type ids, of an encoder.
        vectors: replacement for the token embedding's rows; None: no replacement.
        taps: values that are captured or edited.
    """

    tokens: Int[Array, " tokens"]
    length: Int[Array, ""]
    types: Int[Array, " tokens"] | None = None
    vectors: Float[Array, "tokens width"] | None = None
    taps: ActivationTaps | None = None


class _GivenRows(Embedding):
    """A token embedding with fixed output rows; a tied head still multiplies by its weight."""

    def __init__(self, whole: Embedding, rows: Array) -> None:
        self.dtype, self.weight = whole.dtype, whole.weight
        self.rows = nnx.Variable(rows)

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens width"]:
        """Returns the fixed rows for any tokens."""
        return self.rows[...].astype(self.dtype).reshape(*tokens.shape, -1)


def token_embedding(module: Model, stack: str) -> Embedding:
    """Finds the first token embedding of a stack's stem."""
    owner, name = _named(module, stack)
    found: Embedding = owner[name]
    return found


def encode_text(module: Model, text: Text) -> dict[str, Any]:
    """Computes the encoder's results by name, [tokens, width], or [width] per text.

    With taps there is also "captured": by name, the values [1, tokens, ...].
    """
    owner, name = _named(module, "encoder")
    whole = owner[name]
    if text.vectors is not None:
        owner[name] = _GivenRows(whole, text.vectors)
    types = jnp.zeros_like(text.tokens) if text.types is None else text.types
    found = module.encode(text.tokens[None], types[None], text.length[None], text.taps)
    owner[name] = whole  # the decoder may have the same
    captured = {} if text.taps is None else {"captured": found.pop("captured")}
    return {key: value[0] for key, value in found.items()} | captured


def decode_text(
    module: Model, caches: CacheShapes, text: Text, source: Text | None = None
) -> dict[str, Any]:
    """Computes the decoder's results by name; "captured" as in `encode_text`, with the encoder's.

    Args:
        caches: as in `AbstractModel`.
        source: the encoder's text, for an encoder-decoder.
    """
    blocks = {"": _blocks(text), ENCODER: 0 if source is None else _blocks(source)}
    counts = {
        name: 1 if isinstance(shape, StateShape) else blocks.get(shape.group, blocks[""])
        for name, shape in caches.items()
    }
    tables = {
        shape.group: jnp.arange(counts[name], dtype=jnp.int32)[None]
        for name, shape in caches.items()
    }
    read: dict[str, Any] = {}
    cache = zero_cache(caches, counts, module.dtype)
    encoded = jnp.zeros(1, jnp.int32)
    if source is not None:
        read, encoded = encode_text(module, source), source.length[None]
        at = AttentionMetadata(*_places(source), tables[ENCODER])
        cache = module.fill(read["hidden"][None], cache, at)
    if text.vectors is not None:
        owner, name = _named(module, "decoder")
        owner[name] = _GivenRows(owner[name], text.vectors)
    batch = ForwardBatch.flat(*_places(text), text.length[None], tables, encoded)
    results, _ = module.decode_all(text.tokens, batch._replace(taps=text.taps), cache)
    if "captured" in read:
        results["captured"] = read["captured"] | results["captured"]
    return results


def _blocks(text: Text) -> int:
    return -(-text.tokens.shape[0] // BLOCK)


def _places(text: Text) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Returns each token's row, -1 for padding, and position."""
    positions = jnp.arange(text.tokens.shape[0], dtype=jnp.int32)
    return jnp.where(positions < text.length, 0, -1), positions


def _named(module: Model, stack: str) -> tuple[nnx.Dict, str]:
    """Finds `token_embedding`: the object that has it, and its name there."""
    found = module.stacks[stack]
    name = found.stem.first_call("tokens")
    return (found.modules if name in found.modules else module.shared), name
