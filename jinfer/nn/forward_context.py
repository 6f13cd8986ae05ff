"""Where the tokens of a forward pass stand: a flat batch over a paged cache, or whole texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

from jinfer.nn.positions import CosSin, Rotary
from jinfer.ops.attention.hadamard import turned
from jinfer.ops.attention.kv_cache import LayerCache, Placement, cache_group, write
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import extend

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Copies(NamedTuple):
    """A flat batch whose tokens may stand in several rows of the tables: branches of a tree.

    Attributes:
        sources: the token of each place.
        rows, positions: of each place, as those of a flat batch.
        places: one place of each token, whose result is the token's.
    """

    sources: Int[Array, " places"]
    rows: Int[Array, " places"]
    positions: Int[Array, " places"]
    places: Int[Array, " tokens"]


class Elsewhere(Protocol):
    """What stands for a cache whose attention is computed by other programs."""

    def extend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads value_dim"] | None,
        at: Placement,
        rules: ScoreRules,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Attention's output, as `jinfer.ops.attention.paged_attention.extend` gives it."""
        ...


type Kept = LayerCache | Elsewhere


class Step(NamedTuple):
    """Where the tokens of one forward pass stand.

    A decoder computes a flat batch, one row of tokens of any sequences; an encoder whole texts, a
    row each.

    Attributes:
        positions: of each token in its sequence.
        totals: tokens of each token's sequence as far as it is known; rotary embeddings that
            stretch with the length depend on it.
        lengths: of whole texts, without their padding.
        rows: of a flat batch: which sequence each token belongs to, -1 for padding...
        tables: ...and where the blocks of each sequence are, by group of attentions.
        encoded: tokens of the encoder's output that each sequence may see, where there is one.
        cos_sin: of rotary embeddings, where it is known already, by `str` of their block.
        copies: of a flat batch: where tokens are that stand in several rows.
    """

    positions: Int[Array, "batch tokens"]
    totals: Int[Array, "batch tokens"]
    lengths: Int[Array, " batch"] | None = None
    rows: Int[Array, " tokens"] | None = None
    tables: Mapping[str, Int[Array, "rows blocks"]] | None = None
    encoded: Int[Array, " rows"] | None = None
    cos_sin: dict[str, CosSin] | None = None
    copies: Copies | None = None

    @classmethod
    def of_texts(cls, tokens: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]) -> Step:
        """Whole texts, padded at their ends."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        totals = jnp.broadcast_to(lengths[:, None], tokens.shape)
        return cls(jnp.broadcast_to(positions, tokens.shape), totals, lengths)

    @classmethod
    def flat(
        cls,
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        prompts: Int[Array, " rows"],
        tables: Mapping[str, Int[Array, "rows blocks"]],
        encoded: Int[Array, " rows"],
    ) -> Step:
        """A flat batch.

        Args:
            prompts: tokens of each sequence's prompt, all of which were known from the start.
        """
        totals = jnp.maximum(prompts[jnp.maximum(rows, 0)], positions + 1)
        return cls(positions[None], totals[None], rows=rows, tables=dict(tables), encoded=encoded)

    def placement(self, group: str) -> Placement:
        """Where a group of attentions finds what the tokens' sequences have in the cache."""
        assert self.rows is not None, "whole texts have no cache"
        assert self.tables is not None, "whole texts have no cache"
        return Placement(self.rows, self.positions[0], self.tables[group])

    def extend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads value_dim"] | None,
        cache: Kept,
        window: int | None,
        rules: ScoreRules,
    ) -> tuple[Float[Array, "tokens heads value_dim"], Kept]:
        """`paged_attention.extend` for a flat batch, in the group that looks back so far."""
        at, copies = self.placement(cache_group(window)), self.copies
        if not isinstance(cache, LayerCache):
            return cache.extend(q, k, v, at, rules), cache
        if v is not None:  # else a part of the keys are the values, which stay what they are
            q, k = turned(q, k, cache.keys)
        if copies is None:
            return extend(q, k, v, cache, at, rules)
        q, k = q[copies.sources], k[copies.sources]
        v = v if v is None else v[copies.sources]
        at = at._replace(rows=copies.rows, positions=copies.positions)
        out, cache = extend(q, k, v, cache, at, rules)
        return out[copies.places], cache

    def keep(self, vectors: Float[Array, "tokens 1 width"], cache: LayerCache) -> LayerCache:
        """The cache with vectors of the tokens in it, wherever these stand."""
        at, copies = self.placement(cache_group(None)), self.copies
        if copies is not None:
            vectors = vectors[copies.sources]
            at = at._replace(rows=copies.rows, positions=copies.positions)
        return write(cache, vectors, vectors[..., :0], at)

    def encoded_last(self) -> Int[Array, " tokens"]:
        """The last position of the encoder's output that each token sees."""
        assert self.rows is not None, "whole texts have no cache"
        assert self.encoded is not None, "cross-attention needs an encoder's output"
        return jnp.where(self.rows >= 0, self.encoded[jnp.maximum(self.rows, 0)] - 1, -1)

    def cos_sin_of(self, rope: Rotary) -> CosSin:
        """What the tokens are rotated by."""
        known = (self.cos_sin or {}).get(str(rope.block))
        return rope.cos_sin(self.positions, self.totals) if known is None else known

    def with_cos_sin(self, ropes: Iterable[Rotary]) -> Step:
        """The same, with what these rotate by computed once for all layers."""
        cos_sin = {
            str(rope.block): rope.cos_sin(self.positions, self.totals)
            for rope in {str(each.block): each for each in ropes if not each.block.factors}.values()
        }
        # Without the barrier XLA computes the sines anew in each layer.
        return self._replace(cos_sin=lax.optimization_barrier(cos_sin))


def split(x: Float[Array, "batch tokens width"], heads: int) -> Array:
    """[batch, tokens, heads, width / heads]."""
    return x.reshape(*x.shape[:2], heads, -1)
