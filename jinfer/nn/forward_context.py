"""Forward batch: token positions and block tables of a forward pass (vLLM: attention metadata)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import jax.numpy as jnp
from jax import Array, lax

from jinfer.nn.activation_taps import ActivationTaps
from jinfer.nn.image_modules import GridRotary, PatchGrid
from jinfer.nn.positions import CosSin, Rotary
from jinfer.nn.row_edits import IMAGES, ImageRows, take_row_edits
from jinfer.ops.attention.hadamard import rotate_qk, rotate_queries
from jinfer.ops.attention.kv_cache import (
    ADAPTER,
    OFFSET,
    STATE,
    AttentionMetadata,
    IndexedCache,
    LayerCache,
    cache_group,
    write_cache,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend, attend_cached, extend
from jinfer.ops.attention.sparse import IndexQuery, extend_sparse
from jinfer.ops.matmul.lora import RowAdapters, row_adapters
from jinfer.ops.recurrence.sequence_runs import DraftRuns, SequenceRuns, sequence_runs

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TreeCopies(NamedTuple):
    """Tree attention: a flat batch whose tokens occur in several branches (rows of the tables).

    Attributes:
        sources: the token of each copy.
        rows, positions: of each copy, as in a flat batch.
        outputs: the copy of each token whose result is used.
    """

    sources: Int[Array, " places"]
    rows: Int[Array, " places"]
    positions: Int[Array, " places"]
    outputs: Int[Array, " tokens"]


class RemoteAttention(Protocol):
    """Replaces a KV cache if other programs compute its attention."""

    def extend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads value_dim"] | None,
        at: AttentionMetadata,
        rules: ScoreRules,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Computes attention as `jinfer.ops.attention.paged_attention.extend` does."""
        ...


type AttentionCache = LayerCache | IndexedCache | RemoteAttention


class ForwardBatch(NamedTuple):
    """Token positions and block tables of one forward pass.

    A decoder computes a flat batch: one row with tokens of any sequences (continuous batching). An
    encoder computes whole texts, one per row; an encoder of images has a tile's patches in a row.

    Attributes:
        positions: of each token in its sequence.
        totals: known length of each token's sequence; dynamic RoPE scaling depends on it.
        lengths: of whole texts, without padding.
        rows: flat batch: each token's sequence (table row), -1 for padding.
        tables: flat batch: the block tables by group of attentions.
        encoded: number of encoder output tokens each sequence attends to, if any.
        cos_sin: RoPE angles, if precomputed, by `str` of their block.
        copies: flat batch: tree branches in which tokens occur.
        runs: flat batch: the adjacent tokens of each sequence, for recurrent blocks.
        adapters: flat batch: each token's adapter, if any.
        taps: values to capture or edit, if any; within a layer its own taps.
        rotary: positions for RoPE, by time, row and column if there are three; None: `positions`.
        images: flat batch: what images change, if there are any; its edits are among the taps.
        grid: tiles: the rows and columns of the patches.
    """

    positions: Int[Array, "batch tokens"]
    totals: Int[Array, "batch tokens"]
    lengths: Int[Array, " batch"] | None = None
    rows: Int[Array, " tokens"] | None = None
    tables: Mapping[str, Int[Array, "rows blocks"]] | None = None
    encoded: Int[Array, " rows"] | None = None
    cos_sin: dict[str, CosSin] | None = None
    copies: TreeCopies | None = None
    runs: SequenceRuns | None = None
    adapters: RowAdapters | None = None
    taps: ActivationTaps | None = None
    rotary: Int[Array, "batch tokens"] | Int[Array, "3 batch tokens"] | None = None
    images: ImageRows | None = None
    grid: PatchGrid | None = None

    @classmethod
    def of_texts(
        cls, tokens: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]
    ) -> ForwardBatch:
        """Makes a batch of whole texts, padded at their ends."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        totals = jnp.broadcast_to(lengths[:, None], tokens.shape)
        return cls(jnp.broadcast_to(positions, tokens.shape), totals, lengths)

    @classmethod
    def of_patches(cls, grid: PatchGrid, tokens: int) -> ForwardBatch:
        """Makes a batch of tiles, padded at their ends.

        Args:
            tokens: of a tile with its padding; more than patches if there are class tokens, which
                come first.
        """
        lengths = grid.counts + (tokens - grid.rows.shape[1])
        batch = cls.of_texts(jnp.zeros((grid.rows.shape[0], tokens), jnp.int32), lengths)
        return batch._replace(grid=grid)

    def resized(self, tokens: int) -> ForwardBatch:
        """Makes the batch of tiles after a layer that has merged patches to so many tokens."""
        if self.grid is None or tokens == self.positions.shape[1]:
            return self
        size = math.isqrt(self.positions.shape[1] // tokens)
        return ForwardBatch.of_patches(self.grid.merged(size, tokens), tokens)

    @classmethod
    def flat(
        cls,
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        prompts: Int[Array, " rows"],
        tables: Mapping[str, Int[Array, "rows blocks"]],
        encoded: Int[Array, " rows"],
    ) -> ForwardBatch:
        """Makes a flat batch.

        Args:
            prompts: prompt length of each sequence.
            tables: the block tables, and the sequences' adapters, edits, captured activations and
                images, if any.
        """
        totals = jnp.maximum(prompts[jnp.maximum(rows, 0)], positions + 1)
        blocks, adapters = dict(tables), None
        if (slots := blocks.pop(ADAPTER, None)) is not None:
            adapters = row_adapters(slots, rows)
        capture, requested = take_row_edits(blocks, rows, positions)
        images = cast("ImageRows | None", blocks.pop(IMAGES, None))
        edits = requested if images is None else images.before(requested)
        taps = ActivationTaps(capture, edits) if capture or edits else None
        rotary = None
        if (offsets := blocks.pop(OFFSET, None)) is not None:
            rotary = (positions + offsets[jnp.maximum(rows, 0), 0])[None]
        if images is not None and images.shifts is not None:
            rotary = (positions[None] + images.shifts)[:, None]
        batch = cls(positions[None], totals[None], rows=rows, tables=blocks, encoded=encoded)
        return batch._replace(adapters=adapters, taps=taps, rotary=rotary, images=images)

    def attention_metadata(self, group: str) -> AttentionMetadata:
        """Returns positions and block tables for a group of attentions."""
        assert self.rows is not None, "whole texts have no cache"
        assert self.tables is not None, "whole texts have no cache"
        return AttentionMetadata(self.rows, self.positions[0], self.tables[group])

    def extend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads value_dim"] | None,
        cache: AttentionCache,
        window: int | None,
        rules: ScoreRules,
        index: IndexQuery | None = None,
    ) -> tuple[Float[Array, "tokens heads value_dim"], AttentionCache]:
        """Computes `paged_attention.extend` of a flat batch, in the group with this sliding window.

        Args:
            index: sparse attention: the indexer's results (`sparse.extend_sparse`).
        """
        at, copies = self.attention_metadata(cache_group(window)), self.copies
        if not isinstance(cache, LayerCache | IndexedCache):
            return cache.extend(q, k, v, at, rules), cache
        if v is not None:  # otherwise values are a part of the keys and must not be rotated
            vectors = cache if isinstance(cache, LayerCache) else cache.vectors
            q, k = rotate_qk(q, k, vectors.keys)
        if copies is not None:
            q, k = q[copies.sources], k[copies.sources]
            v = v if v is None else v[copies.sources]
            index = index if index is None else index.select_rows(copies.sources)
            at = at._replace(rows=copies.rows, positions=copies.positions)
        after: AttentionCache
        if isinstance(cache, IndexedCache):
            if copies is not None and cache.chosen is not None:
                cache = cache._replace(chosen=cache.chosen[copies.sources])
            out, after = extend_sparse(q, k, v, index, cache, at, rules)
            if copies is not None and after.chosen is not None:  # the same in every branch
                after = after._replace(chosen=after.chosen[copies.outputs])
        else:
            out, after = extend(q, k, v, cache, at, rules)
            out = self._both_ways(out, q, after, v is None, at, rules)
        return out if copies is None else out[copies.outputs], after

    def _both_ways(
        self,
        out: Float[Array, "tokens heads value_dim"],
        q: Float[Array, "tokens heads head_dim"],
        cache: LayerCache,
        shared: bool,
        at: AttentionMetadata,
        rules: ScoreRules,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Replaces the output of tokens that attend both ways within a range, such as an image.

        They see what a causal token sees, and their range, also where it is before the window.

        Args:
            shared: whether the cache's keys are its values too.
        """
        ranges = None if self.images is None else self.images.ranges
        if self.images is not None and rules.window is not None and ranges is None:
            ranges = self.images.window_ranges
        if ranges is None:
            return out
        first, last = ranges
        inside = last >= 0
        positions = at.positions
        if rules.window is not None:
            positions = jnp.minimum(positions, first + rules.window - 1)
        seen = at._replace(rows=jnp.where(inside, at.rows, -1), positions=positions)
        values = None if shared else cache.values
        whole = attend(q, cache.keys, values, seen, last, rules, cache.int8_keys)
        return jnp.where(inside[:, None, None], whole, out)

    def attend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        cache: LayerCache,
        window: int | None,
        rules: ScoreRules,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Computes `extend` with the keys and values of another attention of this window."""
        at, copies = self.attention_metadata(cache_group(window)), self.copies
        q = rotate_queries(q, cache.keys)
        if copies is None:
            out = attend_cached(q, cache, at, rules)
            return self._both_ways(out, q, cache, False, at, rules)
        at = at._replace(rows=copies.rows, positions=copies.positions)
        return attend_cached(q[copies.sources], cache, at, rules)[copies.outputs]

    def write_vectors(
        self, vectors: Float[Array, "tokens 1 width"], cache: LayerCache
    ) -> LayerCache:
        """Writes vectors of the tokens to the cache, in every branch."""
        at, copies = self.attention_metadata(cache_group(None)), self.copies
        if copies is not None:
            vectors = vectors[copies.sources]
            at = at._replace(rows=copies.rows, positions=copies.positions)
        return write_cache(cache, vectors, vectors[..., :0], at)

    def with_runs(self) -> ForwardBatch:
        """Computes the batch's runs once for all layers, if any layer has a state."""
        if self.tables is None or STATE not in self.tables or self.runs is not None:
            return self
        at = self.attention_metadata(STATE)
        return self._replace(runs=sequence_runs(at, at.tables))

    def with_draft_runs(self) -> ForwardBatch:
        """Marks the batch's tokens as drafted: some may be rejected; see `accept_drafted`."""
        batch = self.with_runs()
        return batch if batch.runs is None else batch._replace(runs=DraftRuns(*batch.runs))

    def sequence_runs(self) -> SequenceRuns:
        """Returns the runs of a flat batch, each with its sequence's state slot."""
        assert self.runs is not None, "the model has recurrent blocks"
        assert self.copies is None, "a state has one future"
        return self.runs

    def encoded_last(self) -> Int[Array, " tokens"]:
        """Returns the last encoder position each token attends to."""
        assert self.rows is not None, "whole texts have no cache"
        assert self.encoded is not None, "cross-attention needs an encoder's output"
        return jnp.where(self.rows >= 0, self.encoded[jnp.maximum(self.rows, 0)] - 1, -1)

    def cos_sin_of(self, rope: Rotary) -> CosSin:
        """Returns the RoPE angles of the tokens."""
        known = (self.cos_sin or {}).get(str(rope.block))
        return self._angles(rope) if known is None else known

    def _angles(self, rope: Rotary) -> CosSin:
        if not isinstance(rope, GridRotary):
            positions = self.positions if self.rotary is None else self.rotary
            return rope.cos_sin(positions, self.totals)
        assert self.grid is not None, "only patches are on a grid"
        return rope.grid_cos_sin(self.grid, self.positions.shape[1])

    def with_cos_sin(self, ropes: Iterable[Rotary]) -> ForwardBatch:
        """Computes the batch's RoPE angles once for all layers."""
        cos_sin = {
            str(rope.block): self._angles(rope)
            for rope in {str(each.block): each for each in ropes if not each.has_factors}.values()
        }
        # Without the barrier XLA recomputes the sines in each layer.
        return self._replace(cos_sin=lax.optimization_barrier(cos_sin))


def split_heads(x: Float[Array, "batch tokens width"], heads: int) -> Array:
    """[batch, tokens, width] -> [batch, tokens, heads, width / heads]."""
    return x.reshape(*x.shape[:2], heads, -1)
