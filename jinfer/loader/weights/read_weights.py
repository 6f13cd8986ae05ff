"""Reading weights: threads read the parameters of a plan and put them on their devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np

from jinfer.loader.weights.native_parameters import NativeOrigin, Source, batches
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import (
    LARGE,
    RowSlice,
    Selection,
    read_parameter,
    reported,
    row_slice,
)
from jinfer.loader.weights.storage_plan import PER_BYTE, per_weight
from jinfer.loader.weights.tensor_mapping import Origin, parameter_shapes
from jinfer.progress import task
from jinfer.quant.calibration_stats import InputStats

# Puts a parameter of NumPy arrays on its devices; the first argument is all its names.
type Put = Callable[[Sequence[str], Any], Any]


def on_device(names: Sequence[str], values: Any) -> Any:
    """Put a parameter on the first device."""
    return jax.block_until_ready(jax.device_put(values))


def read(
    plan: WeightPlan,
    put: Put = on_device,
    selected: Selection | None = None,
    *,
    nonfinite: set[str] | None = None,
    progress: bool = False,
) -> tuple[Any, ...]:
    """Read the parameters of a plan, in the order of its model's names; see `load`.

    Beyond the result, memory holds one decoded tensor per thread at a time.

    Args:
        put: called once with each parameter, by any thread.
        selected: the parameters to read, and the rows of each, which `put` gets as a `RowSlice`;
            None: all.
        nonfinite: receives the names of parameters with NaN or infinite numbers. Matrices of native
            checkpoints are not checked, because they are mapped and not read yet.
        progress: show a bar even if standard error is no terminal.

    Returns:
        The results of `put`.

    Raises:
        LoadError: a tensor does not fit.
        CheckpointError: the checkpoint is damaged.
    """
    model, shapes = plan.plain, parameter_shapes(plan.plain)
    listed = [name for name in model.names if selected is None or name in selected]
    firsts = dict.fromkeys(plan.same[name] for name in listed)
    aliases = dict[str, list[str]]()  # all names of each array
    for name in model.names:
        aliases.setdefault(plan.same[name], []).append(name)
    rates = {name: per_weight(plan.storages.get(name)) for name in firsts}
    quantizes = any(rates.values())

    def read_time(name: str) -> float:
        return plan.origins[name].nbytes * (PER_BYTE if quantizes else 1)

    total = sum(read_time(name) + rates[name] * prod(shapes[name]) for name in firsts)
    # A CPU takes over arrays without a copy, which is faster for all arrays at once.
    together = put is on_device and jax.default_backend() == "cpu"

    def load(name: str, origin: Source) -> Any:
        def watch(_: Any, piece: np.ndarray, __: InputStats | None) -> None:
            bar.update(rates[name] * piece.size)

        report = None if nonfinite is None else partial(nonfinite.add, name)
        if isinstance(origin, NativeOrigin):
            values = origin.read()
            if getattr(values, "nbytes", 0) < LARGE:
                reported(values, report)
        else:
            storage, rows = plan.storages.get(name), _rows(aliases[name], selected)
            sliced = row_slice(origin, shapes, storage, rows)
            own, sizes = sliced or (origin, shapes)
            values = read_parameter(
                model, own, storage, watch=watch, shapes=sizes, on_nonfinite=report
            )
            if sliced is not None and rows is not None:
                values = RowSlice(values, rows.start)
        if name in plan.scales:
            values = plan.scales[name].of(values)
        result = values if together else put(aliases[name], values)
        if isinstance(origin, Origin):
            origin.release()
        bar.update(read_time(name))
        return result

    # Tables first: they need the most memory for a moment, and most memory is free then.
    roles = dict(zip(model.names, model.roles, strict=True))
    order = sorted(firsts, key=lambda name: roles[name] not in ("table", "head"))
    loading = task("loading", total, unit="B", shown=progress and total > 0)
    if quantizes:
        loading = task("quantizing", total, unit="%", shown=progress or None)
    results = dict[str, Any]()
    with loading as bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for batch in batches(plan.checkpoint, {name: plan.origins[name] for name in order}):
            results |= zip(batch, pool.map(load, batch, batch.values()), strict=True)
    if together:
        results = on_device(order, results)
    return tuple(results[plan.same[name]] for name in listed)


def _rows(names: Iterable[str], selected: Selection | None) -> range | None:
    """Return the rows for all names of an array; None: all rows."""
    rows = {selected[name] for name in names if name in selected} if selected else {None}
    return rows.pop() if len(rows) == 1 else None
