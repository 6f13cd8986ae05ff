"""EAGLE/MTP heads: layers that draft from the target's hidden states, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import padded
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.step_key import StepKey, StepKind
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.loader.open_model import Opened
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.tensor_mapping import by_name
from jinfer.modelspec.eagle_head import add_taps, target_layers
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import RuleSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.attention.kv_cache import Cache
from jinfer.speculate.draft_model import DraftModel, put_on


@dataclass(eq=False, kw_only=True)
class EagleDrafter(DraftModel):
    """Drafts with a head that reads the target's hidden states.

    It reads the tokens from the second one on, each with the target's hidden states of the token
    before. Those are in the target's KV cache, so that prefix-cached tokens have them too.

    Attributes:
        scheduler: the target's, whose running sequences have block tables.
    """

    scheduler: Scheduler
    first: ClassVar[int] = 1
    kinds: ClassVar[tuple[StepKind, StepKind]] = "prefill_head", "propose_with_head"

    def _after(self, sequence: RunningSequence, chain: list[int]) -> list[int]:
        # Drafted tokens were computed from the head's own hidden states, so they do not count.
        return sequence.tokens[1:]

    def _prefill(
        self, rows: np.ndarray, positions: np.ndarray, tables: dict[str, np.ndarray]
    ) -> Cache:
        arguments = (rows, positions, tables, self._vectors(rows, positions))
        program = self.runner.programs.get(StepKey("prefill_head", len(rows)))
        return program(self.runner.leaves, self.runner.cache, self.runner.state, *arguments)

    def _hidden(self, sequences: Sequence[RunningSequence], rows: np.ndarray) -> Sequence[Any]:
        positions = padded([len(s.tokens) - 2 for s in sequences], len(rows), -1)
        return (self._vectors(rows, positions),)

    def _vectors(self, rows: np.ndarray, positions: np.ndarray) -> Any:
        """The target's hidden states of some tokens."""
        target = self.target
        program = target.programs.get(StepKey("gather_taps", len(rows)))
        arguments = (rows, positions, target.slot_tables(self.scheduler.running))
        vectors = program(target.programs.hidden_taps(target.cache), *arguments)
        if self.runner.programs.device is None:
            return vectors
        return jax.device_put(vectors, self.runner.programs.device)

    def announce(self) -> list[Future[Program]]:
        keys = [*self._step_keys()]
        counts = sorted({key.tokens for key in keys if key.tokens})
        taps = self.target.programs.announce(StepKey("gather_taps", count) for count in counts)
        return [*self.runner.programs.announce(keys), *taps]


def with_taps(opened: Opened, head: Opened, source: str) -> Opened:
    """The target with taps on the layers that a head reads.

    Args:
        source: name of the head, for messages.

    Raises:
        SpecError: the head does not fit the target.
    """
    follows, decoder = head.spec.follows, opened.spec.decoder
    assert follows is not None, "it is a head"
    assert decoder is not None, "it is a decoder"
    if opened.spec.type != "decoder-only":
        reason = f"{source} is a head, and the model is {opened.spec.type}; a head follows decoders"
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    layers = target_layers(follows, len(decoder.layers))
    if layers is None:
        layer_names = ", ".join(map(str, follows.layers))
        reason = f"{source} follows layers {layer_names}, but the model has {len(decoder.layers)}"
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    hidden = opened.spec.dims.get("hidden", 0)
    if len(layers) * hidden != follows.width:
        reason = (
            f"{source} is given {follows.width} numbers of a token, but {len(layers)} layers of "
            f"the model give {len(layers) * hidden}; take a head that was made for it"
        )
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    return replace(opened, spec=add_taps(opened.spec, layers))


@dataclass(frozen=True)
class EagleWeights:
    """The weights of a head, some of which are the target's.

    Attributes:
        model: the head, with its parameters as they are stored.
        own, shared: weights from the head's files, and from the target's.
    """

    model: AbstractModel
    own: WeightPlan
    shared: WeightPlan

    def load(self, target: ModelRunner, programs: Any, progress: bool) -> tuple[Any, ...]:
        """Loads all parameters; on the target's device the shared ones are the target's arrays."""
        if programs.device is not None:
            put = put_on(programs.device)
            loaded = load(self.own, put, progress=progress)
            known: tuple[Any, ...] = load(self.shared, put, progress=progress)
        else:
            loaded = load(self.own, progress=progress)
            every = dict(zip(target.model.names, target.parameters, strict=True))
            known = tuple(every[name] for name in self.shared.model.names)
        named = dict(zip(self.own.model.names, loaded, strict=True))
        named |= dict(zip(self.shared.model.names, known, strict=True))
        return tuple(named[name] for name in self.model.names)


def eagle_weights(target: ModelRunner, opened: Opened, head: Opened, *, same: bool) -> EagleWeights:
    """Finds the weights of a head.

    Args:
        same: the head is in the target's checkpoint, so that all common weights are shared.

    Raises:
        LoadError, CheckpointError: weights that are missing.
    """
    model = build_abstract_model(head.spec, jnp.dtype(head.dtype))
    shapes = {n: p.shape for n, p in zip(target.model.names, target.model.parameters, strict=True)}
    stacks = tuple(f"{stack.name}." for stack in head.spec.stacks)
    files = by_name(head.checkpoint, head.spec.tensors)

    def is_shared(name: str, parameter: Any) -> bool:
        if name.startswith(stacks) or shapes.get(name) != parameter.shape:
            return False
        place = head.spec.tensors.source_of(name)
        there = place is not None and any(n in files for p in place.candidates() for n in p.names)
        return same or not there

    of_model = {n for n, p in zip(model.names, model.parameters, strict=True) if is_shared(n, p)}
    own_part = _only(model, (n for n in model.names if n not in of_model))
    ruled = _ruled(head.spec, own_part)
    own = plan_weights(own_part, ruled, head.checkpoint, head.activations, kv_cache=head.kv_cache)
    whole = build_abstract_model(opened.spec, jnp.dtype(opened.dtype))
    part = _only(whole, of_model)
    # The rest of the checkpoint is not reported as unused.
    tensors = replace(opened.spec.tensors, ignore=("*",))
    spec = replace(_ruled(opened.spec, part), tensors=tensors)
    shared = plan_weights(part, spec, opened.checkpoint, opened.activations)
    stored = {
        name: parameter
        for plan in (own, shared)
        for name, parameter in zip(plan.model.names, plan.model.parameters, strict=True)
    }
    full = replace(model, parameters=tuple(stored[name] for name in model.names))
    return EagleWeights(full, own, shared)


def _ruled(spec: ModelSpec, part: AbstractModel) -> ModelSpec:
    """The specification with only those quantization rules that match a part's weights."""

    def is_about(rule: RuleSpec) -> bool:
        names = [*part.names, *(name.removesuffix(".weight") for name in part.names)]
        return any(fnmatchcase(name, rule.match) for name in names)

    rules = tuple(rule for rule in spec.quantization.rules if is_about(rule))
    return replace(spec, quantization=replace(spec.quantization, rules=rules))


def _only(model: AbstractModel, names: Iterable[str]) -> AbstractModel:
    """The model with only some of its parameters."""
    layer_names = set(names)
    places = [place for place, name in enumerate(model.names) if name in layer_names]
    parts: dict[str, Any] = {
        key: tuple(getattr(model, key)[place] for place in places)
        for key in ("names", "parameters", "axes", "roles")
    }
    return replace(model, **parts)
