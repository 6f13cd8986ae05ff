"""Weight loader: the plan of a model's weights becomes parameters on its devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.layouts.scaled_layout import FP8
from jinfer.loader.weights.grouped_blocks import described
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.qk_equalization import equalized
from jinfer.loader.weights.quantized_cache import cached
from jinfer.loader.weights.read_parameter import Selection, nonfinite_tensor
from jinfer.loader.weights.read_weights import Put, on_device, read
from jinfer.loader.weights.tensor_mapping import Origin
from jinfer.progress import line
from jinfer.quant.scaled_tensor import ScaledTensor


def load(
    plan: WeightPlan,
    put: Put = on_device,
    selected: Selection | None = None,
    *,
    progress: bool = False,
) -> tuple[Any, ...]:
    """Load the parameters of a model, in the order of its names.

    Args:
        put: places a parameter on its devices.
        selected: the parameters to load, see `read`; None: all.
        progress: show a bar even if standard error is no terminal.

    Returns:
        The results of `put`: on a single device an array, or a `QuantizedTensor` of arrays.

    Raises:
        LoadError: a tensor does not fit.
        CheckpointError: the checkpoint is damaged.
    """
    report_rounding(plan)
    plan = cached(plan, progress=progress)
    plan = equalized(plan, selected, progress=progress)
    nonfinite = set[str]()
    parameters = read(plan, put, selected, nonfinite=nonfinite, progress=progress)
    report_nonfinite(plan, nonfinite)
    return parameters


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor of 8-bit floats, except NaN."""
    found = np.unique(tensor.raw()).view(DTYPES[tensor.type]).astype(np.float32)
    return float(np.nanmax(np.abs(found), initial=0.0))


def report_rounding(plan: WeightPlan) -> None:
    """Report on standard error which weights of a quantized checkpoint are rounded or decoded.

    Also report FP8 tensors without scales: either intended, or the scales are missing.
    """
    losses = defaultdict[tuple[str, str], list[float]](list)
    for name, storage in plan.storages.items():
        origin = plan.origins[name]
        if storage.lost and isinstance(origin, Origin):
            losses[origin.tensors[0].type, described(storage.format)].append(storage.lost)
    decoded = Counter[str]()
    for name, parameter in zip(plan.plain.names, plan.plain.parameters, strict=True):
        origin = plan.origins[name]
        stored = origin.tensors[0] if isinstance(origin, Origin) else None
        kept = name in plan.storages or isinstance(parameter, ScaledTensor)
        if stored and stored.sources and stored.type not in DTYPES and not kept:
            decoded[f"{stored.type} are decoded to {parameter.dtype}"] += 1
    origins = [origin for origin in plan.origins.values() if isinstance(origin, Origin)]
    bare = {
        tensor.name: tensor for origin in origins for tensor in origin.tensors if tensor.type in FP8
    }
    if bare:
        first = next(iter(bare.values()))
        line(
            f"jinfer: {plan.checkpoint.path}: {len(bare)} tensors in {first.type} have no scales, "
            f"and are loaded without: {first.name} first, up to {_largest(first):g}; if they "
            "need scales, answers are wrong: see whether a file is missing"
        )
    for what, count in decoded.items():
        line(f'jinfer: {count} matrices in {what} (quantization.weights = "q8" takes less memory)')
    for (kind, format), lost in losses.items():
        line(
            f"jinfer: {len(lost)} matrices in {kind} keep their codes, as {format}; the numbers "
            f"of their blocks are rounded, which moves weights by up to {max(lost):.1%} of a step "
            '(by nothing with dtype = "float32")'
        )


def report_nonfinite(plan: WeightPlan, found: Collection[str]) -> None:
    """Report on standard error which tensors have NaN or infinite numbers.

    It is no error: a row of a table may belong to a token that is never used, and an attention sink
    or the bias of an expert may be -inf. If such numbers reach logits, requests fail.

    Args:
        found: names of parameters.
    """
    if found:
        name = next(name for name in plan.plain.names if name in found)
        origin = plan.origins[name]
        what = f"{name} has numbers that are NaN or infinite"
        if isinstance(origin, Origin):
            what = nonfinite_tensor(origin)
        more = f", and so have {len(found) - 1} other parameters" if len(found) > 1 else ""
        advice = "get the file again, unless they are meant; requests that they reach fail"
        line(f"jinfer: {plan.checkpoint.path}: {what}{more}: {advice}")
