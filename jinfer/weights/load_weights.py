"""Loading: from the plan of a model's weights to parameters on its devices."""

from __future__ import annotations

from typing import Any

from jinfer.weights.plan_weights import WeightPlan
from jinfer.weights.qk_equalization import equalized
from jinfer.weights.quantized_cache import cached
from jinfer.weights.read_weights import Put, on_device, read
from jinfer.weights.row_slices import Wanted


def load(
    plan: WeightPlan,
    put: Put = on_device,
    wanted: Wanted | None = None,
    *,
    progress: bool = False,
) -> tuple[Any, ...]:
    """Loads the parameters of a model, in the order of its names.

    Args:
        put: places a parameter on its devices.
        wanted: the parameters that are loaded, as of `read`; None: all.
        progress: show a bar even where standard error is no terminal.

    Returns:
        What `put` gave for each parameter: on one device an array, or a `QuantizedTensor` of them.

    Raises:
        LoadError: a tensor does not fit.
        CheckpointError: the checkpoint is damaged.
    """
    plan = cached(plan, progress=progress)
    plan = equalized(plan, wanted, progress=progress)
    return read(plan, put, wanted, progress=progress)
