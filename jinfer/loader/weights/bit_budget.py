"""Bits per matrix under a budget, `quantization.weights = "4.25 bits"`.

Each matrix gets one of a few formats, so that the sum of the costs of their rounding errors is
least. A cost is the divergence (KL) of the model's predictions. If costs are unknown, all matrices
have the same format.

To second order, an error D of a matrix makes the predictions of a text diverge by 1/2 <G, D>^2,
where G is the gradient of the text's log-likelihood, with its tokens drawn from the model's own
predictions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

from jinfer.loader.weights.layer_forward import LayerwiseForward, Leaves, Texts, Vectors
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import read_values, values_to_quantize
from jinfer.loader.weights.storage_plan import budgeted, candidates, choose, matrices, stored_size
from jinfer.loader.weights.tensor_mapping import Origin, parameter_shapes
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.ops.backend import DIFFERENTIABLE, target_platform
from jinfer.progress import Task, task
from jinfer.quant.calibration_stats import InputStats, RecordedWeight, record_inputs
from jinfer.quant.gptq import factor_hessian
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.round_to_nearest import split_into_blocks
from jinfer.quant_format import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Float


_TOKENS = 1 << 10  # tokens that costs are measured with
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
        name: replace(storage, format=formats[chosen[first]])
        if (first := plan.same[name]) in chosen
        else storage
        for name, storage in plan.storages.items()
    }
    return replace(plan, storages=storages)


def mean_square_error(values: np.ndarray, format: QuantFormat) -> float:
    """Return the mean square error of rounding a matrix to a format, from some of its rows."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, rows.size // _SAMPLE)
    blocks = split_into_blocks(rows[::step], format.block).reshape(-1, format.block)
    blocks = np.resize(blocks, (_SAMPLE // format.block, format.block))  # the same program for all
    rounded = quantize(blocks, format, method="mse").dequantize()
    return float(np.square(np.asarray(rounded) - blocks, dtype=np.float64).mean())


def _costs(
    plan: WeightPlan, firsts: Sequence[str], texts: Sequence[Texts], progress: bool
) -> dict[str, float]:
    """Return the cost of each name, together with the names of the same array."""
    walk = LayerwiseForward(build_abstract_model(plan.spec, "float32"), plan.spec.stacks[0].name)
    shapes, origins = parameter_shapes(plan.plain), cast("Mapping[str, Origin]", plan.origins)

    def values(name: str) -> jax.Array:
        if name in plan.storages:
            return jnp.asarray(values_to_quantize(plan.plain, origins[name], shapes), jnp.float32)
        stored = read_values(plan.plain, origins[name], shapes, np.dtype(np.float32))
        return jnp.asarray(stored, jnp.float32)

    matrices = {
        name: storage.method == "gptq"
        for name, storage in plan.storages.items()
        if plan.same[name] in firsts
    }
    # Feedback does better for texts that it is computed for: some of the longest are left out.
    longest = max(ids.shape[1] for ids in texts)
    single = [row[None] for batch in texts for row in batch if batch.shape[1] == longest]
    count = min(max(1, _TOKENS // longest), -(-len(single) // 2))
    some, rest = single[:count], single[count:]
    found = dict[str, float]()
    costs = divergence_costs(walk, values, some, matrices, calibration=rest, progress=progress)
    for name, cost in costs.items():
        first = plan.same[name]
        found[first] = found.get(first, 0.0) + cost
    return found


type Read = Callable[[str], Array]  # gives a parameter by name, in float32
type _Whiten = Callable[[Array], Array]


def divergence_costs(
    walk: LayerwiseForward,
    read: Read,
    texts: Sequence[Texts],
    matrices: Mapping[str, bool],
    *,
    calibration: Sequence[Texts] = (),
    progress: bool = False,
) -> dict[str, float]:
    """Return the divergence, in nats a token, for rounding errors with a mean square of 1.

    Memory holds a layer with its gradients, and the vectors of all texts between all layers.

    Args:
        read: reads the weights of a layer; called for each layer in turn.
        texts: texts whose predictions diverge, each [1, tokens].
        matrices: names of matrices, tables and heads -> whether GPTQ quantizes them.
        calibration: other texts, which GPTQ is calibrated on; empty: `texts`, for which GPTQ does
            better than for others.

    Returns:
        A cost for each of `matrices` that the texts' predictions depend on.
    """
    layers = len(walk.layers)
    steps = len(texts) * (2 * layers + 3) + len(calibration or texts) * (layers + 1)
    with (
        target_platform(DIFFERENTIABLE),
        task("weighing matrices", steps, unit="step", shown=progress or None) as bar,
    ):
        return _Costs(walk, read, texts, matrices, calibration, bar).found()


class _Costs:
    """A forward and a backward pass, a layer at a time."""

    def __init__(
        self,
        walk: LayerwiseForward,
        read: Read,
        texts: Sequence[Texts],
        matrices: Mapping[str, bool],
        calibration: Sequence[Texts],
        bar: Task,
    ) -> None:
        self._walk, self._read_one, self._texts, self._matrices = walk, read, texts, matrices
        self._calibration = calibration
        self._bar, self._sums = bar, defaultdict[str, float](float)
        self._others = self._read(walk.others)

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        return {name: self._read_one(name) for name in names}

    def found(self) -> dict[str, float]:
        """The costs by name."""
        walk, texts, others = self._walk, self._texts, self._others
        vectors: list[Sequence[Vectors]] = [[walk.embed(others, ids) for ids in texts]]
        inputs: list[dict[str, InputStats]] = []
        read = self._calibration or texts
        before = [walk.embed(others, ids) for ids in read]
        for number, names in enumerate(walk.layers):
            run, leaves = partial(walk.layer, number), self._read(names)
            before, stats = self._recorded(leaves, run, before)
            inputs.append(stats)
            own = {**others, **leaves}
            pairs = zip(vectors[-1], texts, strict=True)
            vectors.append([jax.block_until_ready(run(own, x, ids)) for x, ids in pairs])
            self._bar.update(len(texts))
        heads = {name: others[name] for name in walk.others if self._matrices.get(name)}
        _, stats = self._recorded(heads, walk.finish, before)
        last = vectors[-1]
        slopes = self._head_gradients(last, self._whitenings(stats))
        for number in reversed(range(len(walk.layers))):
            chosen, fixed = self._chosen(self._read(walk.layers[number]))
            fixed = {**others, **fixed}
            white = self._whitenings(inputs.pop())
            arrived = vectors[number]
            for text, ids in enumerate(texts):
                backward = partial(self._layer, number, ids, fixed)
                _, back = jax.vjp(backward, chosen, arrived[text])
                gradients, slopes[text] = back(slopes[text])
                self._add(gradients, white)
        tables, fixed = self._chosen(others)
        for text, ids in enumerate(texts):
            _, back = jax.vjp(lambda own, ids=ids: walk.embed({**fixed, **own}, ids), tables)
            self._add(back(slopes[text])[0], {})
        tokens = sum(ids.size for ids in texts)
        return {name: 0.5 * value / tokens for name, value in self._sums.items()}

    def _layer(self, number: int, ids: Texts, fixed: Leaves, chosen: Leaves, x: Vectors) -> Vectors:
        return self._walk.layer(number, {**fixed, **chosen}, x, ids)

    def _recorded(
        self,
        leaves: Leaves,
        run: Callable[[Leaves, Vectors, Texts], Vectors],
        vectors: Sequence[Vectors],
    ) -> tuple[list[Vectors], dict[str, InputStats]]:
        """Results for each text that GPTQ is computed for, and the statistics of the inputs."""
        tapped = {
            name: record_inputs(leaf, "products") if self._matrices.get(name) else leaf
            for name, leaf in leaves.items()
        }
        results = []
        for x, ids in zip(vectors, self._calibration or self._texts, strict=True):
            results.append(jax.block_until_ready(run({**self._others, **tapped}, x, ids)))
            self._bar.update(1)
        taps = {name: leaf for name, leaf in tapped.items() if isinstance(leaf, RecordedWeight)}
        return results, {name: leaf.inputs() for name, leaf in taps.items()}

    def _head_gradients(
        self, vectors: Sequence[Vectors], white: Mapping[str, _Whiten]
    ) -> list[Vectors]:
        """The gradients of the last layer's outputs, with tokens that the model would write."""
        walk, slopes = self._walk, list[Vectors]()
        chosen, fixed = self._chosen(self._others)
        for text, ids in enumerate(self._texts):

            def logits(chosen: Any, x: Vectors, ids: Texts = ids) -> Any:
                return walk.logits({**fixed, **chosen}, x, ids)

            scores, back = jax.vjp(logits, chosen, vectors[text])
            drawn = jax.random.categorical(jax.random.key(text), scores)
            slope = jax.nn.one_hot(drawn, scores.shape[-1]) - jax.nn.softmax(scores)
            gradients, x = back(slope.astype(scores.dtype))
            self._add(gradients, white)
            slopes.append(x)
        return slopes

    def _chosen(self, leaves: Leaves) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide weights into those whose costs are computed, and the others."""
        chosen = {name: leaf for name, leaf in leaves.items() if name in self._matrices}
        return chosen, {name: leaf for name, leaf in leaves.items() if name not in chosen}

    def _add(self, gradients: Leaves, white: Mapping[str, _Whiten]) -> None:
        for name, gradient in gradients.items():
            own = white.get(name)
            squares = jnp.vdot(gradient, gradient) if own is None else own(gradient)
            self._sums[name] += float(squares)
        self._bar.update(1)

    @staticmethod
    def _whitenings(inputs: Mapping[str, InputStats]) -> dict[str, _Whiten]:
        """By name, what gives |G R^-T diag(R)|^2 of a gradient G."""
        return {name: _whitening(stats) for name, stats in inputs.items() if stats.rows.any()}


def _whitening(inputs: InputStats) -> _Whiten:
    factors = []
    for index in np.ndindex(inputs.rows.shape):
        if inputs.rows[index]:
            size = inputs.mean.shape[-1]
            upper, places = factor_hessian(inputs.mean[index], size, 1)
            factors.append((index, jnp.asarray(upper, jnp.float32), jnp.asarray(places)))

    def squares(gradient: Array) -> Array:
        return sum(_squares(gradient[index], *factor) for index, *factor in factors)

    return squares


@jax.jit
def _squares(
    gradient: Float[Array, "outputs inputs"], upper: Array, places: Array
) -> Float[Array, ""]:
    whole = solve_triangular(upper, gradient[:, places].T, lower=False)
    whole = whole * jnp.diag(upper)[:, None]
    return jnp.vdot(whole, whole)
