"""A layer whose attention is computed in several places, cut into pure functions.

`ask` goes up to what attention is asked for, `part` is attention over one place's blocks, and
`tell` goes on from all of them. Both run the layer's whole formula; what they do not give is not
computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import Places, Tables
from jinfer.ops.attention.hadamard import turned
from jinfer.ops.attention.kv_cache import Cache, LayerCache, Placement
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import extend_part
from jinfer.ops.attention.partial_merge import Part, joined
from jinfer.parallel.stage import StageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Leaves = tuple[Array, ...]


class Asked(NamedTuple):
    """What an attention is asked for: new queries, keys, values, and what changes their scores."""

    q: Float[Array, "tokens heads head_dim"]
    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads value_dim"] | None
    slopes: Float[Array, " heads"] | None
    by_distance: Float[Array, "heads distances"] | None


@dataclass
class Question:
    """Which attention is asked, and its rules without arrays; known once `ask` has been traced."""

    name: str = ""
    rules: ScoreRules = field(default_factory=lambda: ScoreRules(1.0))


@dataclass
class _Replay:
    """A layer's attentions: the first ones are answered, the next one is asked."""

    told: Mapping[str, Sequence[Part]]
    name: str = ""
    asked: Asked | None = None
    rules: ScoreRules | None = None


@dataclass(frozen=True)
class _Named:
    """What stands for the cache of one of them."""

    replay: _Replay
    name: str

    def extend(
        self, q: Array, k: Array, v: Array | None, at: Placement, rules: ScoreRules
    ) -> Array:
        """The answer if it is known; else it is asked, and nobody reads what follows."""
        replay = self.replay
        if self.name in replay.told:
            return joined(replay.told[self.name], rules.sinks, q.dtype)
        if replay.asked is None:
            replay.name = self.name
            replay.asked = Asked(q, k, v, rules.slopes, rules.by_distance)
            replay.rules = rules._replace(sinks=None, slopes=None, by_distance=None)
        return jnp.zeros((*q.shape[:2], (k if v is None else v).shape[-1]), q.dtype)


def ask(
    stage: StageModel,
    question: Question,
    leaves: Leaves,
    cache: Cache,
    x: Float[Array, "1 tokens hidden"],
    places: Places,
    tables: Tables,
    told: Mapping[str, Sequence[Part]],
) -> Asked:
    """What the next attention of a layer is asked for.

    Args:
        stage: of one layer.
        question: is filled in.
        cache: of attentions over an encoder's output, which are computed here.
        told: what is known of the attentions before it.
    """
    replay = _Replay(told)
    _run(stage, replay, leaves, cache, x, places, tables)
    assert replay.asked is not None, "there are attentions left"
    assert replay.rules is not None, "and it has rules"
    question.name, question.rules = replay.name, replay.rules
    return replay.asked


def tell(
    stage: StageModel,
    leaves: Leaves,
    cache: Cache,
    x: Float[Array, "1 tokens hidden"],
    places: Places,
    tables: Tables,
    told: Mapping[str, Sequence[Part]],
) -> Float[Array, "1 tokens hidden"]:
    """The layer's output, from what all places found; arguments as of `ask`."""
    return _run(stage, _Replay(told), leaves, cache, x, places, tables)


def _run(
    stage: StageModel,
    replay: _Replay,
    leaves: Leaves,
    cache: Cache,
    x: Array,
    places: Places,
    tables: Tables,
) -> Array:
    module, at = stage.model.module(leaves), places.step(tables)
    kept: dict[str, Any] = {
        name.rpartition(".")[2]: cache[name] if name in cache else _Named(replay, name)
        for name in stage.model.caches
    }
    return module.stacks["decoder"].run_alone(x, places.tokens[None], at, kept, module.shared)


def part(
    rules: ScoreRules,
    blocks: tuple[int, int],
    asked: Asked,
    cache: LayerCache,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    table: Int[Array, "rows blocks"],
) -> tuple[Part, LayerCache]:
    """Attention over one place's blocks, into which new keys and values go that belong there.

    Args:
        rules: without arrays.
        blocks: the first of its blocks, and the first after them.
        cache: the place's pool.
        table: of all places' blocks.
    """
    first, end = blocks
    own = jnp.where((table >= first) & (table < end), table - first, -1)
    q, k, v, slopes, by_distance = asked
    rules = rules._replace(slopes=slopes, by_distance=by_distance)
    if v is not None:  # as in `jinfer.nn.forward_context`
        q, k = turned(q, k, cache.keys)
    return extend_part(q, k, v, cache, Placement(rows, positions, own), rules)
