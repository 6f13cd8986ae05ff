"""What the error of each matrix costs, in divergence (KL) of the model's predictions.

To second order, an error D of a matrix makes the predictions of a text diverge by 1/2 <G, D>^2,
where G is the gradient of the text's log-likelihood, with its tokens drawn from the model's own
predictions (the mean of G G^T is the Fisher information). GPTQ's error is E diag(R) R^-1, where
H = R R^T are the products of the matrix's inputs (`jinfer.quant.gptq`) and E the errors of
rounding, which hardly depend on each other. So its expected divergence is

    1/2 * mean square of E * |G R^-T diag(R)|^2

and without GPTQ 1/2 * mean square of E * |G|^2. A few texts suffice, because the norm is
a sum over all weights of a matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

from jinfer.ops.backend import DIFFERENTIABLE, target_platform
from jinfer.progress import Task, task
from jinfer.quant.calibration_stats import InputStats, RecordedWeight, record_inputs
from jinfer.quant.gptq import DAMPING, factor_hessian
from jinfer.weights.layer_forward import LayerwiseForward, Leaves, Texts, Vectors

if TYPE_CHECKING:
    from jaxtyping import Float

type Read = Callable[[str], Array]  # gives a parameter by name, in float32
type _Whiten = Callable[[Array], Array]


def divergence_costs(
    walk: LayerwiseForward,
    read: Read,
    texts: Sequence[Texts],
    wanted: Mapping[str, bool],
    *,
    calibration: Sequence[Texts] = (),
    progress: bool = False,
) -> dict[str, float]:
    """The divergence in nats a token for a mean square of 1 of a matrix's rounding errors.

    Memory holds one layer and its gradients, and the vectors of all texts between all layers.

    Args:
        read: is called for one layer after the other.
        texts: whose predictions diverge, each [1, tokens].
        wanted: names of matrices, tables and heads -> whether they get GPTQ.
        calibration: what that is computed for, other texts; none: the same, for which it does
            better than for others.

    Returns:
        A cost for each of `wanted` that the texts' predictions depend on.
    """
    layers = len(walk.layers)
    steps = len(texts) * (2 * layers + 3) + len(calibration or texts) * (layers + 1)
    with (
        target_platform(DIFFERENTIABLE),
        task("weighing matrices", steps, unit="step", shown=progress or None) as bar,
    ):
        return _Costs(walk, read, texts, wanted, calibration, bar).found()


class _Costs:
    """A pass forwards and one backwards, through one layer at a time."""

    def __init__(
        self,
        walk: LayerwiseForward,
        read: Read,
        texts: Sequence[Texts],
        wanted: Mapping[str, bool],
        calibration: Sequence[Texts],
        bar: Task,
    ) -> None:
        self._walk, self._one, self._texts, self._wanted = walk, read, texts, wanted
        self._calibration = calibration
        self._bar, self._sums = bar, defaultdict[str, float](float)
        self._others = self._read(walk.others)

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        return {name: self._one(name) for name in names}

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
            each = zip(vectors[-1], texts, strict=True)
            vectors.append([jax.block_until_ready(run(own, x, ids)) for x, ids in each])
            self._bar.update(len(texts))
        heads = {name: others[name] for name in walk.others if self._wanted.get(name)}
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
            name: record_inputs(leaf, "products") if self._wanted.get(name) else leaf
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
        """Those whose costs are wanted, and the others."""
        chosen = {name: leaf for name, leaf in leaves.items() if name in self._wanted}
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
            upper, places = factor_hessian(inputs.mean[index], size, 1, DAMPING)
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
