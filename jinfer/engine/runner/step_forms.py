"""Forms of compiled steps: which parts of a step use the device state, the model and the KV cache.

Each form can be compiled as one program on one device (`on_one_device`), and as a chain of programs
for the stages of a pipeline (`jinfer.parallel.pipeline`). So a step is written once, for one device
and for several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.captured_calls import POSITIONS
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.encoder_steps import encode, fill_cross_attention
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.head_steps import gather_taps
from jinfer.engine.runner.steps import Leaves, decode_loop
from jinfer.engine.runner.verify import accept_states
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.nn.row_edits import CAPTURE, is_of_head
from jinfer.ops.attention.kv_cache import Cache

type Outputs = tuple[Any, ...]


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


@dataclass(frozen=True)
class StateStep:
    """A step that changes the device state and does not use the model's weights.

    Attributes:
        function: (state, *arguments) -> the state, and maybe other results.
        arguments: abstract arrays.
        slots: index of the argument that names slots or state rows.
        returns: whether there are other results.
    """

    function: Callable[..., Any]
    arguments: Outputs
    slots: int
    returns: bool = False

    def on_one_device(self, inputs: Any) -> StepFunction:
        """The step on one device."""
        return StepFunction(self.function, 0, (inputs.state, *self.arguments))


@dataclass(frozen=True)
class CacheStep:
    """A step of the KV cache alone, which every part of the model runs on its own cache.

    Attributes:
        function: (model, cache, *arguments) -> the cache, or what is read from it.
        arguments: abstract arrays.
        reads: whether the cache stays as it is; the result is then a tuple, with what each part of
            the model reads.
        rows: index of the argument that is such a tuple; None: there is none.
    """

    function: Callable[..., Any]
    arguments: Outputs
    reads: bool = False
    rows: int | None = None

    def on_one_device(self, inputs: Any) -> StepFunction:
        """The step on one device."""
        model: AbstractModel = inputs.model

        def run(cache: Cache, *arguments: Any) -> Any:
            own = list(arguments)
            if self.rows is not None:
                own[self.rows] = own[self.rows][0]
            result = self.function(model, cache, *own)
            return (result,) if self.reads else result

        return StepFunction(run, () if self.reads else 0, (inputs.cache, *self.arguments))


@dataclass(frozen=True)
class TapStep:
    """The step that reads the cached hidden states for a draft head: see `head_steps.gather_taps`.

    Attributes:
        arguments: abstract arrays.
    """

    arguments: Outputs

    def on_one_device(self, inputs: Any) -> StepFunction:
        """The step on one device."""
        return StepFunction(gather_taps, (), (inputs.hidden_taps(inputs.cache), *self.arguments))


@dataclass(frozen=True)
class EncoderStep:
    """A forward pass of the encoder over whole texts.

    Attributes:
        arguments: abstract arrays.
        want: the result; None: it is put into the KV cache, for cross-attention.
    """

    arguments: Outputs
    want: Want | None

    def on_one_device(self, inputs: Any) -> StepFunction:
        """The step on one device."""
        if self.want is None:
            function, cache = inputs.with_leaves(fill_cross_attention), inputs.cache
        else:
            function, cache = inputs.with_leaves(encode, self.want), {}
        return StepFunction(function, 1, (inputs.leaves, cache, *self.arguments))


@dataclass(frozen=True)
class ForwardStep:
    """A forward pass of the decoder over a flat batch.

    Attributes:
        arguments: abstract arrays, after weights, cache and, where there is a `begin`, the state.
        finish: (state, results, carried, *arguments) -> outputs, the state first if `samples`. The
            arguments are without the block tables.
        wants: the results that `finish` reads.
        begin: (state, tables, *arguments) -> the flat batch, the tokens whose results are wanted
            (None: all) and what `finish` needs besides; None: the first argument is the batch.
        tables: index of the block tables among the arguments of a step with a `begin`.
        samples: whether the state changes.
        drafted: whether tokens may be rejected: the first argument is then a `verify.Nodes`, and
            recurrent states are those after the accepted nodes.
        kept: how many of the first outputs only later calls need.
        captures: whether the tables may name activations to capture, which follow the outputs.
        loops: (state, *arguments) -> the shapes of an output, where steps repeat on one device as
            long as `decode_loop` says; its arguments are then the sequences' rows, the number of
            steps and maybe the flag that interrupts.
    """

    arguments: Outputs
    finish: Callable[..., Outputs]
    wants: tuple[Want, ...] = ("logits",)
    begin: Callable[..., tuple[FlatBatch, Array | None, Any]] | None = None
    tables: int = 0
    samples: bool = False
    drafted: bool = False
    kept: int = 0
    captures: bool = False
    loops: Callable[..., Any] | None = None

    def on_one_device(self, inputs: Any) -> StepFunction:
        """The step on one device."""
        own = (inputs.leaves, inputs.cache, *([] if self.begin is None else [inputs.state]))
        donated = (1, 2) if self.samples else 1
        run = self._once if self.loops is None else self._repeated
        return StepFunction(inputs.with_leaves(run), donated, (*own, *self.arguments))

    def without_tables(self, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The block tables, and the other arguments."""
        rest = list(arguments)
        return rest.pop(self.tables), rest

    def _once(self, model: AbstractModel, leaves: Leaves, cache: Cache, *arguments: Any) -> Any:
        if self.begin is None:
            state, rest = None, list(arguments)
            batch, last, carried = FlatBatch(*arguments[0]), None, None
        else:
            state = arguments[0]
            tables, rest = self.without_tables(arguments[1:])
            batch, last, carried = self.begin(state, tables, *rest)
        cache, results = self._pass(model, leaves, cache, batch, last)
        outputs = self.finish(state, results, carried, *rest)
        if self.drafted:
            cache = accept_states(cache, batch, rest[0].roots, outputs[1].tokens)
        return cache, *outputs, *self._captured(batch, results)

    def _repeated(
        self, model: AbstractModel, leaves: Leaves, cache: Cache, state: State, *arguments: Any
    ) -> Any:
        assert self.begin is not None, "steps that repeat read the state"
        assert self.loops is not None, "it repeats"
        begin, (tables, rest) = self.begin, self.without_tables(arguments)
        rows, steps, *flag = rest

        def compute(leaves: Leaves, cache: Cache, state: State, hidden: None) -> Any:
            batch, last, carried = begin(state, tables, *rest)
            cache, results = self._pass(model, leaves, cache, batch, last)
            captured = self._captured(batch, results)
            results = {want: results[want] for want in self.wants}
            return cache, (results, captured), carried, hidden

        def choose(state: State, computed: Any, carried: Any) -> Any:
            results, captured = computed
            state, *outputs = self.finish(state, results, carried, *rest)
            return state, (*outputs, *captured)

        none = self.loops(state, *rest), *self._abstract_captured(compute, leaves, cache, state)
        begun = leaves, cache, state, rows, steps, *flag
        cache, state, outputs = decode_loop(compute, choose, none, *begun)
        return cache, state, *outputs

    def _pass(
        self,
        model: AbstractModel,
        leaves: Leaves,
        cache: Cache,
        batch: FlatBatch,
        last: Array | None,
    ) -> tuple[Cache, dict[str, Any]]:
        """The cache, and the results of the forward pass."""
        at, chosen = batch.step(), None if last is None else jnp.maximum(last, 0)
        at = at.with_draft_runs() if self.drafted else at
        # What the head computes is captured of all tokens.
        names: Any = batch.tables.get(CAPTURE, ()) if self.captures else ()
        every = any(map(is_of_head, names))
        module, wanted = model.module(leaves), None if every else chosen
        results, cache = module.decode_all(batch.tokens, at, cache, wanted)
        return cache, results | ({"logits": results["logits"][chosen]} if every else {})

    def _captured(self, batch: FlatBatch, results: dict[str, Any]) -> tuple[dict[str, Array], ...]:
        """Captured activations [tokens, ...], and the position of each token; -1: padding."""
        if not self.captures or CAPTURE not in batch.tables:
            return ()
        positions = jnp.where(batch.rows >= 0, batch.positions, -1)
        captured = {name: value[0] for name, value in results["captured"].items()}
        return (captured | {POSITIONS: positions},)

    def _abstract_captured(self, compute: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        if not self.captures:
            return ()
        return tuple(jax.eval_shape(compute, *arguments, None)[1][1])


type Step = StateStep | CacheStep | TapStep | EncoderStep | ForwardStep | StepFunction
