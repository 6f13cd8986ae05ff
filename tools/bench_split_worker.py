"""Benchmark worker of `bench_process_splits`: one process of a job; a task per input line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jinfer import progress
from jinfer.api.job_processes import run_job, run_worker
from jinfer.distributed.current_group import current_group
from jinfer.distributed.job_config import find_job
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.parallel.cost_model import Interconnect

from .bench_engine_worker import TimedEngine
from .bench_links import MatmulRates, pass_link, sum_link
from .llama_peer import answer_tasks


def work(options: argparse.Namespace, keys: Mapping[str, Any]) -> int:
    """First prints the cost model's measurements, then measures the tasks of standard input.

    Args:
        keys: overrides the model is opened with, by dotted name.
    """
    progress.show(False)  # the parent process shows progress
    job = find_job(vars(options), {})
    if job is None:
        return _lead(options, keys)
    return run_job(job, lambda: _lead(options, keys), lambda: _follow(options, keys))


def _lead(options: argparse.Namespace, keys: Mapping[str, Any]) -> int:
    print(json.dumps(_figures(options, keys)), flush=True)
    return answer_tasks(lambda: TimedEngine(options.source, keys))


def _follow(options: argparse.Namespace, keys: Mapping[str, Any]) -> None:
    _figures(options, keys)
    run_worker(options.source, keys)


def _figures(options: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The rates of this process's cores, and in a job the links and all cores together."""
    opened = open_model(options.source, dict(keys))
    plain = build_abstract_model(opened.spec, jnp.dtype(opened.dtype))
    model = plan_weights(plain, opened.spec, opened.checkpoint, opened.activations).model
    matrices, hidden, group = matrices_of(model), opened.spec.dims["hidden"], current_group()
    found, products = dict[str, Any](), MatmulRates(matrices[-1])
    if group is None or group.rank == 0:
        found = {"read": products.read(), "flops": products.flops(options.requests)}
    if group is None:
        return found
    group.gather(True)  # all are ready,
    group.broadcast(True)  # and begin
    found["together"] = sum(group.gather(products.read()))
    # One of a layer's sums follows a matrix of middle size, attention's, one the largest ones.
    after = [
        sum_link(hidden, each) for each in (MatmulRates(matrices[len(matrices) // 2]), products)
    ]
    rate = len(after) / sum(1 / link.rate for link in after)
    sums = Interconnect(rate, sum(link.latency for link in after) / len(after))
    for name, link in (("sums", sums), ("passes", pass_link(group, hidden))):
        found[name] = [link.rate, link.latency]
    return found


def matrices_of(model: AbstractModel) -> list[Any]:
    """The matrices of layers as stored, smallest first."""
    found = [
        parameter
        for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True)
        if role == "matrix" and len(parameter.shape) == 2 and name.split(".")[1].isdigit()
    ]
    return sorted(found, key=nbytes)
