"""Distributed job: runs the coordinator on rank 0 and workers on the other ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jinfer.api.build_engine import build_engine, load
from jinfer.api.loaded_adapters import with_merged_adapters
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.engine import Engine
from jinfer.engine.engine_thread import close_all
from jinfer.engine.runner.program_cache import use_persistent_cache
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.loader.weights.quantized_cache import with_formats
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.ops.backend import start
from jinfer.parallel.distributed.current_group import current_group
from jinfer.parallel.distributed.distributed_pipeline import worker_loop
from jinfer.parallel.distributed.initialize import join_job
from jinfer.parallel.distributed.job_config import JobConfig
from jinfer.parallel.distributed.process_group import LOST

_INTERRUPTED = 130  # exit status after Ctrl-C, which is no error


def run_worker(source: str | Path, overrides: Mapping[str, Any], *, progress: bool = False) -> None:
    """Worker: computes this rank's share of what rank 0 does with an `LLM` of the same source.

    To be called on every rank but 0 after `join_job`. Returns when rank 0 closes its model; when
    the job ends, the process ends.

    Raises:
        SourceError, SpecError, CheckpointError, LoadError, TokenizerError: as `LLM`.
    """
    group = current_group()
    assert group is not None, "the process has joined a job"
    try:
        engine = _open(source, overrides, progress)
    except USER_ERRORS as error:
        group.gather(error=str(error))
        raise
    worker_loop(group, engine.runner.programs, engine.runner.leaves)


def _open(source: str | Path, overrides: Mapping[str, Any], progress: bool) -> Engine:
    """The engine of a worker, whose weights are loaded."""
    start()
    program_cache = use_persistent_cache()
    opened = open_model(source, overrides)
    model = build_abstract_model(opened.spec, jnp.dtype(opened.dtype), program_cache)
    opened = with_merged_adapters(opened, model)
    files, activations = opened.checkpoint, opened.activations
    plan = with_formats(
        plan_weights(model, opened.spec, files, activations, kv_cache=opened.kv_cache)
    )
    engine = build_engine(opened, plan.model)
    load(engine, plan, progress=progress)
    return engine


def run_job(job: JobConfig, lead: Callable[[], int], follow: Callable[[], None]) -> int:
    """Joins a job, and runs one function on rank 0 and another on the other ranks.

    Args:
        lead: runs on rank 0; returns the exit status.
        follow: runs on the other ranks.

    Returns:
        The exit status. If it is an error's, the other ranks have ended with it.

    Raises:
        SourceError: the job cannot be joined.
    """
    group = join_job(job)
    try:
        if group.rank:
            _ignore_signals()
            follow()
            group.ended(group.receive()[0])
        status = lead()
        group.is_leaving = True
        close_all()  # before the job ends: running requests need the other ranks
    except KeyboardInterrupt:
        group.is_leaving = True
        close_all()
        group.end()
        raise
    except USER_ERRORS as error:
        if group.rank:
            group.ended(group.receive()[0])
        group.end(2, f"process 0: {error}")
        raise
    except BaseException as error:
        if group.rank:
            group.fail(error)
        group.end(LOST, f"process {group.rank} failed: {type(error).__name__}: {error}")
        raise
    if status in (0, _INTERRUPTED):
        group.end()
    else:
        group.end(status, f"process 0 ended with status {status}, and says why")
    return status


def _ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM on a worker: rank 0 handles them, and ends the others."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
