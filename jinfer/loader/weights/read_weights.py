"""Reading weights: the parameters of a plan, one a thread at a time, each put on its device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import jax
import numpy as np

from jinfer.loader.weights.native_parameters import NativeOrigin, Source, batches
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import LARGE, RowSlice, Wanted, read_parameter, row_slice
from jinfer.loader.weights.storage_plan import PER_BYTE, per_weight
from jinfer.loader.weights.tensor_mapping import Origin, parameter_shapes
from jinfer.progress import task
from jinfer.quant.calibration_stats import InputStats

# Puts a parameter, in NumPy's arrays, on its devices; is given all names that it has.
type Put = Callable[[Sequence[str], Any], Any]


def on_device(names: Sequence[str], values: Any) -> Any:
    """Puts a parameter on the first device."""
    return jax.block_until_ready(jax.device_put(values))


def read(
    plan: WeightPlan,
    put: Put = on_device,
    wanted: Wanted | None = None,
    *,
    look: Callable[[str, Any], None] | None = None,
    progress: bool = False,
) -> tuple[Any, ...]:
    """Reads the parameters of a plan, in the order of its model's names; see `load`.

    Beyond the result, memory holds one decoded tensor per thread at a time.

    Args:
        put: is given each parameter once, by any thread.
        wanted: the parameters that are read, and the rows of them that are enough, which `put` is
            then given as `RowSlice`; None: all.
        look: is shown each parameter in NumPy's arrays, by any thread; of native checkpoints only
            what is no matrix, because matrices are mapped and not read yet.
        progress: show a bar even where standard error is no terminal.

    Returns:
        What `put` gave for each parameter that is wanted.

    Raises:
        LoadError: a tensor does not fit.
        CheckpointError: the checkpoint is damaged.
    """
    model, shapes = plan.plain, parameter_shapes(plan.plain)
    listed = [name for name in model.names if wanted is None or name in wanted]
    firsts = dict.fromkeys(plan.same[name] for name in listed)
    names = dict[str, list[str]]()  # all those of each array
    for name in model.names:
        names.setdefault(plan.same[name], []).append(name)
    rates = {name: per_weight(plan.storages.get(name)) for name in firsts}
    quantizes = any(rates.values())

    def reading(name: str) -> float:
        return plan.origins[name].nbytes * (PER_BYTE if quantizes else 1)

    total = sum(reading(name) + rates[name] * prod(shapes[name]) for name in firsts)
    # A CPU takes arrays over where they are, which is quicker for all at once.
    together = put is on_device and jax.default_backend() == "cpu"

    def one(name: str, origin: Source) -> Any:
        def watch(_: Any, piece: np.ndarray, __: InputStats | None) -> None:
            bar.update(rates[name] * piece.size)

        alone = rows = None
        if isinstance(origin, NativeOrigin):
            values = origin.read()
            seen = getattr(values, "nbytes", 0) < LARGE
        else:
            storage, rows = plan.storages.get(name), _rows(names[name], wanted)
            alone = row_slice(origin, shapes, storage, rows)
            own, sizes = alone or (origin, shapes)
            values, seen = read_parameter(model, own, storage, watch=watch, shapes=sizes), True
        if look is not None and seen:
            look(name, values)
        if alone is not None and rows is not None:
            values = RowSlice(values, rows.start)
        if name in plan.scales:
            values = plan.scales[name].of(values)
        result = values if together else put(names[name], values)
        if isinstance(origin, Origin):
            origin.release()
        bar.update(reading(name))
        return result

    # Tables first: what they need for a moment is most, and then there is most room.
    roles = dict(zip(model.names, model.roles, strict=True))
    order = sorted(firsts, key=lambda name: roles[name] not in ("table", "head"))
    loading = task("loading", total, unit="B", shown=progress and total > 0)
    if quantizes:
        loading = task("quantizing", total, unit="%", shown=progress or None)
    results = dict[str, Any]()
    with loading as bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for batch in batches(plan.checkpoint, {name: plan.origins[name] for name in order}):
            results |= zip(batch, pool.map(one, batch, batch.values()), strict=True)
    if together:
        results = on_device(order, results)
    return tuple(results[plan.same[name]] for name in listed)


def _rows(names: Iterable[str], wanted: Mapping[str, range | None] | None) -> range | None:
    """The rows that are enough for all parameters that are one array; None: all."""
    each = {wanted[name] for name in names if name in wanted} if wanted else {None}
    return each.pop() if len(each) == 1 else None
