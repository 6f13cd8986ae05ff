"""Draft models, building: from an opened draft model or head to its drafter, and its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.loader.weights import load_weights
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.quantized_cache import with_formats
from jinfer.loader.weights.read_weights import on_device
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.speculate.draft_model import DraftModel, draft_programs
from jinfer.speculate.drafter import DraftContext
from jinfer.speculate.head_drafter import HeadDrafter
from jinfer.speculate.head_weights import head_weights
from jinfer.speculate.open_draft_model import KEY
from jinfer.speculate.other_device import put_on


def model_drafter(context: DraftContext) -> DraftModel:
    """A drafter that runs a model: a head if the model reads the target's hidden states.

    Raises:
        SpecError: its device is not there.
        LoadError, CheckpointError: its weights are not there.
    """
    entry, draft, engine = context.entry, context.draft_model, context.engine
    name = Path(entry.source).stem if entry.source is not None else f"own {entry.weights}"
    kind: type[DraftModel]
    if draft.spec.follows is not None:
        weights = head_weights(engine, context.opened, draft, same=entry.source == "head")
        kind, model, read = HeadDrafter, weights.model, partial(weights.load, engine)
    else:
        whole, files = build_abstract_model(draft.spec, jnp.dtype(draft.dtype)), draft.checkpoint
        plan = with_formats(
            plan_weights(whole, draft.spec, files, draft.activations, kv_cache=draft.kv_cache)
        )
        kind, model, read = DraftModel, plan.model, partial(_load, plan)
    programs = draft_programs(model, engine.programs.sizes, draft.kv_cache, _device(context))
    drafter = kind(programs=programs, target=engine, name=name)

    def load(progress: bool) -> None:
        drafter.parameters = read(programs, progress)

    context.load.append(load)
    return drafter


def _load(plan: WeightPlan, programs: CompiledPrograms, progress: bool) -> tuple[Any, ...]:
    """The weights of a draft model, on its device."""
    put = on_device if programs.device is None else put_on(programs.device)
    return load_weights.load(plan, put, progress=progress)


def _device(context: DraftContext) -> jax.Device | None:
    """The draft model's device; None: the default one, where a target that is not split is."""
    number, there = context.entry.device, jax.devices()
    if number is None:
        return context.engine.programs.home_device
    if number >= len(there):
        are = f"there are {len(there)}, from 0 on" if len(there) > 1 else "there is one, number 0"
        reason = f"device {number} is not there: {are}"
        raise SpecError(context.opened.spec.path, f"{KEY}.device", reason)
    return there[number]
