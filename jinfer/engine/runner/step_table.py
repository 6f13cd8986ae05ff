"""Table of compiled steps: for each kind the function, the donated arguments, the argument shapes.

A new kind of step is a function here, its line in `STEPS`, and its name in `step_key.StepKind`;
models on several devices have a table of their own, see `StagedPrograms.step_makers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jinfer.engine.runner import device_state, encoder_steps, head_steps, steps, trace_steps
from jinfer.engine.runner.draft_steps import propose
from jinfer.engine.runner.edit_tables import abstract_edit_tables
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.sampler_output import MAX_COPIES
from jinfer.engine.runner.step_key import Sizes, StepKey, StepKind
from jinfer.engine.runner.verify import Nodes, verify
from jinfer.modelspec.cache_dtype import Kind
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import TreeCopies
from jinfer.ops.attention.kv_blocks import BlockRows, gather_rows, row_groups, scatter_rows
from jinfer.ops.attention.kv_cache import ADAPTER, Cache, CacheShapes, uninitialized_cache


class StepFunction(NamedTuple):
    """What `jax.jit` needs to compile a step.

    Attributes:
        function: of the arguments.
        donated: indices of the arguments whose buffers the call may reuse.
        arguments: abstract arrays.
    """

    function: Callable[..., Any]
    donated: int | tuple[int, ...]
    arguments: tuple[Any, ...]


class StepInputs(Protocol):
    """What steps are made from; `CompiledPrograms` has it."""

    @property
    def model(self) -> AbstractModel: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def state(self) -> device_state.State: ...
    @property
    def words(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    def tables(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]: ...
    def hidden_taps(self, cache: Cache) -> Any: ...
    def cache_pools(self) -> tuple[CacheShapes, dict[str, int], Kind]: ...
    def abstract_rows(self, count: int) -> tuple[BlockRows, ...]: ...
    def with_leaves(self, function: Callable[..., Any], *first: Any) -> Callable[..., Any]: ...
    def abstract_result(self, key: StepKey) -> Any: ...


def _logits(inputs: StepInputs, key: StepKey) -> StepFunction:
    arguments = (*_arrays(inputs), *_batch(inputs, key), int32(key.chosen))
    return StepFunction(inputs.with_leaves(steps.logits), 1, arguments)


def _sample(inputs: StepInputs, key: StepKey) -> StepFunction:
    words = jax.ShapeDtypeStruct((key.chosen, inputs.words), np.uint32)
    logits = inputs.abstract_result(StepKey("logits", key.chosen, key.chosen))[1:]
    function = partial(steps.sample_logits, inputs.model, key.sampling)
    flag = jax.ShapeDtypeStruct((), np.bool_)
    return StepFunction(function, 0, (inputs.state, *logits, words, flag))


def _decode(inputs: StepInputs, key: StepKey) -> StepFunction:
    function = inputs.with_leaves(steps.decode, key.sampling)
    return StepFunction(function, (1, 2), (*_decoding(inputs, key), int32()))


def _propose(inputs: StepInputs, key: StepKey) -> StepFunction:
    return StepFunction(inputs.with_leaves(propose, key.stages), (1, 2), _decoding(inputs, key))


def _gather_taps(inputs: StepInputs, key: StepKey) -> StepFunction:
    arguments = (inputs.hidden_taps(inputs.cache), *_batch(inputs, key))
    return StepFunction(head_steps.gather_taps, (), arguments)


def _prefill_head(inputs: StepInputs, key: StepKey) -> StepFunction:
    tokens = key.tokens
    arguments = (*_arrays(inputs), *_batch(inputs, key), _head_vectors(inputs, tokens))
    return StepFunction(inputs.with_leaves(head_steps.prefill_head), 1, arguments)


def _propose_with_head(inputs: StepInputs, key: StepKey) -> StepFunction:
    function = inputs.with_leaves(head_steps.propose_with_head, key.stages)
    arguments = (*_decoding(inputs, key), _head_vectors(inputs, key.tokens))
    return StepFunction(function, (1, 2), arguments)


def _verify(inputs: StepInputs, key: StepKey) -> StepFunction:
    masks = [jax.ShapeDtypeStruct((key.tokens, inputs.words), np.uint32)] if key.masked else []
    arguments = (*_arrays(inputs), abstract_nodes(key), _tables(inputs, key, key.tokens), *masks)
    function = inputs.with_leaves(verify, key.sampling)
    return StepFunction(function, (1, 2), arguments)


def _forward(inputs: StepInputs, key: StepKey) -> StepFunction:
    return StepFunction(inputs.with_leaves(steps.forward, key.want), 1, _stateless(inputs, key))


def _score(inputs: StepInputs, key: StepKey) -> StepFunction:
    arguments = (*_stateless(inputs, key), int32(key.tokens))
    return StepFunction(inputs.with_leaves(steps.score), 1, arguments)


def _beam(inputs: StepInputs, key: StepKey) -> StepFunction:
    arguments = (*_stateless(inputs, key), float32(key.tokens))
    return StepFunction(inputs.with_leaves(steps.beam), 1, arguments)


def _contrastive(inputs: StepInputs, key: StepKey) -> StepFunction:
    past = float32(inputs.sizes.context, inputs.hidden)
    arguments = (*_stateless(inputs, key), past, float32(key.tokens), float32())
    return StepFunction(inputs.with_leaves(steps.contrastive), 1, arguments)


def _fill_cross_attention(inputs: StepInputs, key: StepKey) -> StepFunction:
    text = (int32(1, key.tokens), int32(1), int32(1, inputs.sizes.table))
    function = inputs.with_leaves(encoder_steps.fill_cross_attention)
    return StepFunction(function, 1, (inputs.leaves, inputs.cache, *text))


def _encode(inputs: StepInputs, key: StepKey) -> StepFunction:
    texts = int32(key.rows, key.tokens)
    arguments: tuple[Any, ...] = (inputs.leaves, {}, texts, texts, int32(key.rows))
    return StepFunction(inputs.with_leaves(encoder_steps.encode, key.want), 1, arguments)


def _trace(inputs: StepInputs, key: StepKey) -> StepFunction:
    tables = inputs.tables(key.rows)
    if key.blocks:
        narrow = int32(key.rows, key.blocks)
        tables = {name: table if name == ADAPTER else narrow for name, table in tables.items()}
    tables |= abstract_edit_tables(key.taps, key.rows)
    batch = abstract_flat_batch(key.tokens, key.rows, tables)
    function = inputs.with_leaves(trace_steps.trace, key.capture)
    return StepFunction(function, 1, (inputs.leaves, inputs.cache, batch))


def _trace_encoder(inputs: StepInputs, key: StepKey) -> StepFunction:
    texts = int32(key.rows, key.tokens)
    function = inputs.with_leaves(trace_steps.trace_encoder, key.capture)
    tables = abstract_edit_tables(key.taps, key.rows)
    arguments: tuple[Any, ...] = inputs.leaves, {}, texts, texts, int32(key.rows), tables
    return StepFunction(function, (), arguments)


def _copy_blocks(inputs: StepInputs, key: StepKey) -> StepFunction:
    which = {group: int32(MAX_COPIES) for group in inputs.sizes.blocks}
    function = partial(steps.copy_blocks, inputs.model)
    return StepFunction(function, 0, (inputs.cache, which, which, int32()))


def _set_slot(inputs: StepInputs, key: StepKey) -> StepFunction:
    state = inputs.state
    row = jax.tree.map(lambda part: jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype), state)
    return StepFunction(device_state.set_slot, 0, (state, row, int32()))


def _gather_blocks(inputs: StepInputs, key: StepKey) -> StepFunction:
    shapes, ids = inputs.model.caches, row_ids(inputs.model, key.rows)
    return StepFunction(
        lambda cache, ids: (gather_rows(shapes, cache, ids),), (), (inputs.cache, ids)
    )


def _scatter_blocks(inputs: StepInputs, key: StepKey) -> StepFunction:
    shapes, ids = inputs.model.caches, row_ids(inputs.model, key.rows)
    arguments = inputs.cache, inputs.abstract_rows(key.rows), ids
    return StepFunction(
        lambda cache, rows, ids: scatter_rows(shapes, cache, rows[0], ids), 0, arguments
    )


def _allocate_kv_cache(inputs: StepInputs, key: StepKey) -> StepFunction:
    return StepFunction(lambda _: uninitialized_cache(*inputs.cache_pools()), (), ((),))


STEPS: Mapping[StepKind, Callable[[StepInputs, StepKey], StepFunction]] = {
    "logits": _logits,
    "sample": _sample,
    "decode": _decode,
    "verify": _verify,
    "propose": _propose,
    "gather_taps": _gather_taps,
    "prefill_head": _prefill_head,
    "propose_with_head": _propose_with_head,
    "forward": _forward,
    "score": _score,
    "encode": _encode,
    "trace": _trace,
    "trace_encoder": _trace_encoder,
    "beam": _beam,
    "contrastive": _contrastive,
    "fill_cross_attention": _fill_cross_attention,
    "copy_blocks": _copy_blocks,
    "set_slot": _set_slot,
    "allocate_kv_cache": _allocate_kv_cache,
    "gather_blocks": _gather_blocks,
    "scatter_blocks": _scatter_blocks,
}


def _arrays(inputs: StepInputs) -> tuple[Any, ...]:
    return inputs.leaves, inputs.cache, inputs.state


def _tables(inputs: StepInputs, key: StepKey, rows: int) -> dict[str, Any]:
    """Block tables, and those of edits if the step has any."""
    return inputs.tables(rows) | abstract_edit_tables(key.taps, rows)


def _batch(inputs: StepInputs, key: StepKey) -> tuple[Any, ...]:
    """Slots, positions and block tables of a flat batch of running sequences."""
    return int32(key.tokens), int32(key.tokens), _tables(inputs, key, inputs.sizes.slots)


def _decoding(inputs: StepInputs, key: StepKey) -> tuple[Any, ...]:
    """Arguments of a loop that decodes."""
    tables = _tables(inputs, key, inputs.sizes.slots)
    return *_arrays(inputs), int32(key.tokens), tables, int32()


def _stateless(inputs: StepInputs, key: StepKey) -> tuple[Any, ...]:
    """Arguments of a step over a flat batch of sequences that have no slot."""
    batch = abstract_flat_batch(key.tokens, key.rows, _tables(inputs, key, key.rows))
    return inputs.leaves, inputs.cache, batch


def _head_vectors(inputs: StepInputs, tokens: int) -> Any:
    """The target's hidden states that a draft head reads."""
    follows = inputs.model.modules.spec.follows
    assert follows is not None, "only heads read them"
    return float32(tokens, follows.width)


def abstract_flat_batch(tokens: int, rows: int, tables: Any, places: int = 0) -> FlatBatch:
    """An abstract flat batch.

    Args:
        rows: of the arrays of lengths.
        places: as of `abstract_copies`.
    """
    token, row = int32(tokens), int32(rows)
    return FlatBatch(token, token, token, row, row, tables, abstract_copies(places, tokens))


def abstract_tables(sizes: Sizes, rows: int) -> dict[str, Any]:
    """Abstract block tables, and that of adapters if there may be any."""
    return {group: int32(*shape) for group, shape in sizes.table_shapes(rows).items()}


def row_ids(model: AbstractModel, count: int) -> dict[str, Any]:
    """Abstract block ids of `count` rows of each group."""
    return {group: int32(count) for group in row_groups(model.caches)}


def abstract_nodes(key: StepKey) -> Nodes:
    """Abstract draft trees for a "verify"."""
    each, copies = int32(key.tokens), abstract_copies(key.rows, key.tokens)
    return Nodes(each, each, each, each, each, int32(key.chosen), copies)


def abstract_copies(places: int, tokens: int) -> TreeCopies | None:
    """Abstract places of tokens that stand in several rows; None for no places."""
    place = int32(places)
    return TreeCopies(place, place, place, int32(tokens)) if places else None


def int32(*shape: int) -> Any:
    """An abstract int32 array."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def float32(*shape: int) -> Any:
    """An abstract float32 array."""
    return jax.ShapeDtypeStruct(shape, np.float32)
