"""Table of compiled steps: for each kind its parts and the shapes of its arguments.

A new kind of step is a function here, its line in `STEPS`, and its name in `step_key.StepKind`. One
device and a pipeline of several run it by the same line, see `step_forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from jinfer.engine.runner import device_state, head_steps, steps, trace_steps
from jinfer.engine.runner.draft_steps import finish_propose, no_proposals
from jinfer.engine.runner.edit_tables import abstract_edit_tables
from jinfer.engine.runner.encoder_steps import encode_image, patch_values
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.image_rows import abstract_image_rows
from jinfer.engine.runner.sampler_output import MAX_COPIES
from jinfer.engine.runner.step_forms import (
    CacheStep,
    EncoderStep,
    ForwardStep,
    StateStep,
    Step,
    StepFunction,
    TapStep,
)
from jinfer.engine.runner.step_key import Sizes, StepKey, StepKind
from jinfer.engine.runner.verify import Nodes, begin_verify, finish_verify
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import TreeCopies
from jinfer.ops.attention.kv_blocks import BlockRows, gather_rows, row_groups, scatter_rows
from jinfer.ops.attention.kv_cache import Cache, CacheShapes, uninitialized_cache
from jinfer.quant_format import Kind


class StepInputs(Protocol):
    """What steps are made from; `CompiledPrograms` has it."""

    @property
    def model(self) -> AbstractModel: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def slots(self) -> int: ...
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


def _logits(inputs: StepInputs, key: StepKey) -> Step:
    rows, positions, tables = _batch(inputs, key)
    if key.images is not None:
        tables |= abstract_image_rows(key.images, key.tokens)
    arguments = rows, positions, tables, int32(key.chosen)
    return ForwardStep(
        arguments, steps.finish_logits, begin=steps.begin_logits, tables=2, kept=2, captures=True
    )


def _sample(inputs: StepInputs, key: StepKey) -> Step:
    words = jax.ShapeDtypeStruct((key.chosen, inputs.words), np.uint32)
    logits = inputs.abstract_result(StepKey("logits", key.chosen, key.chosen))[1:]
    function = partial(steps.sample_logits, inputs.model, key.sampling)
    flag = jax.ShapeDtypeStruct((), np.bool_)
    return StateStep(function, (*logits, words, flag), slots=1, returns=True)


def _decode(inputs: StepInputs, key: StepKey) -> Step:
    return ForwardStep(
        (*_decoding(inputs, key), int32()),
        partial(steps.finish_decode, inputs.model, key.sampling),
        begin=steps.begin_decode,
        tables=1,
        samples=True,
        captures=True,
        loops=lambda state, rows, *_: steps.empty_output(state, rows.shape[0]),
    )


def _propose(inputs: StepInputs, key: StepKey) -> Step:
    return ForwardStep(
        _decoding(inputs, key),
        partial(finish_propose, key.stages),
        begin=steps.begin_decode,
        tables=1,
        samples=True,
        loops=lambda state, rows, *_: no_proposals(inputs.model, rows.shape[0]),
    )


def _verify(inputs: StepInputs, key: StepKey) -> Step:
    masks = [jax.ShapeDtypeStruct((key.tokens, inputs.words), np.uint32)] if key.masked else []
    return ForwardStep(
        (abstract_nodes(key), _tables(inputs, key, key.tokens), *masks),
        partial(finish_verify, inputs.model, key.sampling),
        begin=begin_verify,
        tables=1,
        samples=True,
        drafted=True,
    )


def _forward(inputs: StepInputs, key: StepKey) -> Step:
    def finish(state: None, results: Any, *_: Any) -> tuple[jax.Array]:
        return (results[key.want].astype(np.float32),)

    return ForwardStep((_flat(inputs, key),), finish, (key.want,))


def _score(inputs: StepInputs, key: StepKey) -> Step:
    return ForwardStep((_flat(inputs, key), int32(key.tokens)), steps.finish_score)


def _beam(inputs: StepInputs, key: StepKey) -> Step:
    arguments = _flat(inputs, key), float32(key.tokens)
    return ForwardStep(arguments, partial(steps.finish_beam, inputs.model))


def _contrastive(inputs: StepInputs, key: StepKey) -> Step:
    past = float32(inputs.sizes.context, inputs.hidden)
    arguments = _flat(inputs, key), past, float32(key.tokens), float32()
    finish = partial(steps.finish_contrastive, inputs.model)
    return ForwardStep(arguments, finish, ("logits", "hidden"), kept=1)


def _gather_taps(inputs: StepInputs, key: StepKey) -> Step:
    return TapStep(_batch(inputs, key))


def _prefill_head(inputs: StepInputs, key: StepKey) -> Step:
    arguments = (*_arrays(inputs), *_batch(inputs, key), _head_vectors(inputs, key.tokens))
    return StepFunction(inputs.with_leaves(head_steps.prefill_head), 1, arguments)


def _propose_with_head(inputs: StepInputs, key: StepKey) -> Step:
    function = inputs.with_leaves(head_steps.propose_with_head, key.stages)
    vectors = _head_vectors(inputs, key.tokens)
    arguments = (*_arrays(inputs), *_decoding(inputs, key), vectors)
    return StepFunction(function, (1, 2), arguments)


def _fill_cross_attention(inputs: StepInputs, key: StepKey) -> Step:
    return EncoderStep((int32(1, key.tokens), int32(1), int32(1, inputs.sizes.table)), None)


def _encode(inputs: StepInputs, key: StepKey) -> Step:
    texts = int32(key.rows, key.tokens)
    return EncoderStep((texts, texts, int32(key.rows)), key.want)


def _encode_image(inputs: StepInputs, key: StepKey) -> Step:
    function = inputs.with_leaves(encode_image)
    patches = float32(key.rows, key.tokens, patch_values(inputs.model.modules.spec))
    return StepFunction(function, (), (inputs.leaves, patches, int32(key.rows, 2)))


def _trace(inputs: StepInputs, key: StepKey) -> Step:
    tables = inputs.tables(key.rows)
    if key.blocks:
        narrow = int32(key.rows, key.blocks)
        tables = {n: narrow if n in inputs.sizes.blocks else t for n, t in tables.items()}
    tables |= abstract_edit_tables(key.taps, key.rows)
    batch = abstract_flat_batch(key.tokens, key.rows, tables)
    function = inputs.with_leaves(trace_steps.trace, key.capture)
    return StepFunction(function, 1, (inputs.leaves, inputs.cache, batch))


def _trace_encoder(inputs: StepInputs, key: StepKey) -> Step:
    texts = int32(key.rows, key.tokens)
    function = inputs.with_leaves(trace_steps.trace_encoder, key.capture)
    tables = abstract_edit_tables(key.taps, key.rows)
    arguments: tuple[Any, ...] = inputs.leaves, {}, texts, texts, int32(key.rows), tables
    return StepFunction(function, (), arguments)


def _copy_blocks(inputs: StepInputs, key: StepKey) -> Step:
    which = {group: int32(MAX_COPIES) for group in inputs.sizes.blocks}
    return CacheStep(steps.copy_blocks, (which, which, int32()))


def _set_slot(inputs: StepInputs, key: StepKey) -> Step:
    def one(part: Any) -> Any:
        return jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype)

    return StateStep(device_state.set_slot, (jax.tree.map(one, inputs.state), int32()), slots=1)


def _gather_blocks(inputs: StepInputs, key: StepKey) -> Step:
    def gather(model: AbstractModel, cache: Cache, ids: Any) -> BlockRows:
        return gather_rows(model.caches, cache, ids)

    return CacheStep(gather, (row_ids(inputs.model, key.rows),), reads=True)


def _scatter_blocks(inputs: StepInputs, key: StepKey) -> Step:
    def scatter(model: AbstractModel, cache: Cache, rows: BlockRows, ids: Any) -> Cache:
        return scatter_rows(model.caches, cache, rows, ids)

    arguments = inputs.abstract_rows(key.rows), row_ids(inputs.model, key.rows)
    return CacheStep(scatter, arguments, rows=0)


def _allocate_kv_cache(inputs: StepInputs, key: StepKey) -> Step:
    return StepFunction(lambda _: uninitialized_cache(*inputs.cache_pools()), (), ((),))


STEPS: Mapping[StepKind, Callable[[StepInputs, StepKey], Step]] = {
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
    "encode_image": _encode_image,
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
    return int32(key.tokens), int32(key.tokens), _tables(inputs, key, inputs.slots)


def _decoding(inputs: StepInputs, key: StepKey) -> tuple[Any, ...]:
    """Rows, tables and number of steps of a loop that decodes."""
    return int32(key.tokens), _tables(inputs, key, inputs.slots), int32()


def _flat(inputs: StepInputs, key: StepKey) -> FlatBatch:
    """A flat batch of sequences that have no slot."""
    return abstract_flat_batch(key.tokens, key.rows, _tables(inputs, key, key.rows))


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
