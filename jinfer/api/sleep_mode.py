"""Sleep mode (vLLM): an open model gives memory back, and takes it again without a compilation."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from jinfer.api.build_engine import load
from jinfer.engine.engine import Engine
from jinfer.engine.requests import RequestError
from jinfer.engine.scheduling.cache_size import trim
from jinfer.loader.open_keywords import override_tables
from jinfer.loader.open_model import open_files
from jinfer.modelspec.spec_errors import show_value

if TYPE_CHECKING:
    from jinfer.api.session import Session

ASLEEP = "the model sleeps; wake it with wake_up()"
LEVELS = (1, 2)


def fall_asleep(session: Session, level: int) -> None:
    """As `LLM.sleep`."""
    if level not in LEVELS or isinstance(level, bool):
        raise RequestError(f"a level of sleep is {show_value(level)}; allowed: 1, 2")
    if not session.opened.spec.partition.is_plain or jax.process_count() > 1:
        raise RequestError("a model on several devices does not sleep; close it")
    with session.changing:
        if session.sleep_level >= level:
            return
        before, session.thread.refusal = session.thread.refusal, ASLEEP
        try:
            at_host = session.thread.run(partial(_release, level), always=True)
        except RequestError:
            session.thread.refusal = before
            raise
        session.sleep_level = level
        session.weights_at_host = at_host if level == 1 else None


def _release(level: int, engine: Engine) -> tuple[np.ndarray, ...] | None:
    """Frees an engine's memory; what it had on another device is returned at level 1."""
    if engine.busy:
        raise RequestError("requests run; let the model sleep when none does")
    engine.recover()  # KV cache, device state and prefix cache are gone
    at_host = None
    if level == 1 and _has_own_memory(engine):
        at_host = tuple(np.asarray(leaf) for leaf in engine.runner.weights)
    if level == 2 or at_host is not None:
        engine.runner.leaves = ()
    gc.collect(0)  # in any collection JAX drops what its threads have left
    trim()
    return at_host


def _has_own_memory(engine: Engine) -> bool:
    """Whether an engine's weights are in another memory than the host's."""
    devices = {device for leaf in engine.runner.weights for device in leaf.devices()}
    return any(device.platform != "cpu" for device in devices)


def wake_up(session: Session) -> None:
    """As `LLM.wake_up`."""
    with session.changing:
        if session.sleep_level == 2:
            _load_again(session)
        elif session.weights_at_host is not None:
            engine, tree = (
                session.engine,
                jax.tree.structure(session.engine.runner.model.parameters),
            )
            leaves = map(jax.device_put, session.weights_at_host)
            engine.runner.parameters = tuple(jax.tree.unflatten(tree, leaves))
        session.weights_at_host, session.sleep_level = None, 0
        session.thread.refusal = ""


def _load_again(session: Session) -> None:
    """Loads an engine's weights from the files that they came from."""
    engine = session.engine
    files = open_files(session.source, override_tables(session.overrides))
    plan = session.plan(replace(session.opened, checkpoint=files.checkpoint))
    stored = dict(zip(plan.model.names, plan.model.parameters, strict=True))
    before = dict(zip(engine.runner.model.names, engine.runner.model.parameters, strict=True))
    changed = next((name for name in stored if stored[name] != before.get(name)), None)
    if changed is not None:
        raise RequestError(
            f"{files.path}: {changed} is not what it was when the model was opened; open it anew"
        )
    load(engine, plan)
    session.adapters.restore(engine)
