"""Bits per matrix under a budget, `quantization.weights = "4.25 bits"`.

Each matrix gets one of a few formats, so that the sum of what their rounding errors cost in
divergence (`divergence_cost`) is least. Where costs are not known all have the same format
(`format_choice`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.modelspec.quant_format import QuantFormat
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.round_to_nearest import split_into_blocks
from jinfer.weights.divergence_cost import divergence_costs
from jinfer.weights.format_choice import candidates, choose
from jinfer.weights.layer_forward import LayerwiseForward, Texts
from jinfer.weights.plan_weights import WeightPlan
from jinfer.weights.read_parameter import read_values, values_to_quantize
from jinfer.weights.storage_plan import budgeted, matrices, stored_size
from jinfer.weights.tensor_mapping import Origin, parameter_shapes

_TOKENS = 1 << 10  # that costs are measured with
_SAMPLE = 1 << 16  # weights of a matrix that are rounded to measure its error


def with_budget(plan: WeightPlan, texts: Sequence[Texts], *, progress: bool = False) -> WeightPlan:
    """The plan with the formats of least divergence, if its specification names a budget.

    Args:
        texts: for calibration.
    """
    bits = plan.spec.quantization.budget
    chosen_here = budgeted(plan.plain, plan.spec.quantization)
    names = [name for name in plan.storages if name in chosen_here and plan.same[name] == name]
    if bits is None or not names:
        return plan
    costs = _costs(plan, names, texts, progress)
    origins = cast("Mapping[str, Origin]", plan.origins)
    formats, shapes = candidates(), parameter_shapes(plan.plain)
    every = {n: shape for n, shape in matrices(plan.plain).items() if plan.same[n] == n}
    room = bits * sum(map(prod, every.values()))
    fixed = [name for name in every if name not in names]
    room -= sum(8 * stored_size(plan.plain, plan.storages, name) for name in fixed)
    sizes, losses = np.zeros((2, len(names), len(formats)))
    for i, name in enumerate(names):
        values = values_to_quantize(plan.plain, origins[name], shapes)
        values = np.asarray(values, np.float32)
        origins[name].release()
        for j, format in enumerate(formats):
            storage = replace(plan.storages[name], format=format)
            sizes[i, j] = 8 * storage.abstract(shapes[name]).nbytes
            losses[i, j] = costs.get(name, 0.0) * mean_square_error(values, format)
    chosen = dict(zip(names, choose(sizes, losses, float(room)), strict=True))
    storages = {
        name: replace(each, format=formats[chosen[first]])
        if (first := plan.same[name]) in chosen
        else each
        for name, each in plan.storages.items()
    }
    return replace(plan, storages=storages)


def mean_square_error(values: np.ndarray, format: QuantFormat) -> float:
    """Of rounding a matrix to a format, from some of its rows."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, rows.size // _SAMPLE)
    blocks = split_into_blocks(rows[::step], format.block).reshape(-1, format.block)
    blocks = np.resize(blocks, (_SAMPLE // format.block, format.block))  # one program for all
    rounded = quantize(blocks, format, method="mse").dequantize()
    return float(np.square(np.asarray(rounded) - blocks, dtype=np.float64).mean())


def _costs(
    plan: WeightPlan, firsts: Sequence[str], texts: Sequence[Texts], progress: bool
) -> dict[str, float]:
    """Of each of these names, together with those that are the same array."""
    walk = LayerwiseForward(build_abstract_model(plan.spec, "float32"), plan.spec.stacks[0].name)
    shapes, origins = parameter_shapes(plan.plain), cast("Mapping[str, Origin]", plan.origins)

    def values(name: str) -> jax.Array:
        if name in plan.storages:
            return jnp.asarray(values_to_quantize(plan.plain, origins[name], shapes), jnp.float32)
        stored = read_values(plan.plain, origins[name], shapes, np.dtype(np.float32))
        return jnp.asarray(stored, jnp.float32)

    wanted = {
        name: each.method == "gptq"
        for name, each in plan.storages.items()
        if plan.same[name] in firsts
    }
    # Feedback does better for texts that it is computed for: some of the longest are left out.
    longest = max(ids.shape[1] for ids in texts)
    single = [row[None] for batch in texts for row in batch if batch.shape[1] == longest]
    count = min(max(1, _TOKENS // longest), -(-len(single) // 2))
    some, rest = single[:count], single[count:]
    found = dict[str, float]()
    costs = divergence_costs(walk, values, some, wanted, calibration=rest, progress=progress)
    for name, cost in costs.items():
        first = plan.same[name]
        found[first] = found.get(first, 0.0) + cost
    return found
