"""GPTQ layer by layer: each layer is quantized for the outputs of the quantized layers before it.

So a layer compensates for their errors as far as its inputs show them (arXiv 2210.17323). Memory
holds a layer in float32, the products of its inputs, and the hidden states of all tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.loader.weights.layer_forward import LayerwiseForward, Leaves, Texts, Vectors
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import (
    Watch,
    read_parameter,
    read_values,
    values_to_quantize,
)
from jinfer.loader.weights.storage_plan import PASSES, PER_PRODUCT, per_weight
from jinfer.loader.weights.tensor_mapping import parameter_shapes
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.progress import Task, task
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.calibration_stats import InputStats, Kind, RecordedWeight, record_inputs
from jinfer.quant.scaled_tensor import ScaledTensor

_THREADS = min(4, os.cpu_count() or 1)

# Gives by a parameter's name what is called with its chunks.
type Watched = Callable[[str], Watch | None]


class LayerwiseGPTQ:
    """The parameters of a model as they are to be stored, in the order of its layers."""

    def __init__(
        self,
        plan: WeightPlan,
        texts: Sequence[Texts],
        *,
        weighed: bool = False,
        watched: Watched = lambda name: None,
        progress: bool = False,
    ) -> None:
        """
        Args:
            plan: plan of a model with a single stack, read from tensors.
            texts: calibration texts.
            weighed: weigh errors by the squares of their inputs in a search.
            progress: show a bar.
        """
        self._model = model = plan.plain
        self._forward = LayerwiseForward(
            build_abstract_model(plan.spec, "float32"), plan.spec.stacks[0].name
        )
        self._origins: Mapping[str, Any] = plan.origins
        self._storages, self._texts = plan.storages, texts
        self._weighed, self._watched, self._progress = weighed, watched, progress
        self._shapes = parameter_shapes(model)
        self.same = plan.same
        firsts = list(self.same.values())
        self._often = {name for name in firsts if firsts.count(name) > 1}
        # By names of firsts, in float32 or as they are stored: what later layers need as well.
        self._known: dict[str, Any] = {}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter in NumPy's arrays; of tied parameters the first."""
        with task("quantizing", self._work(), unit="%", shown=self._progress or None) as bar:
            yield from self._found(bar)

    def _found(self, bar: Task) -> Iterator[tuple[str, Any]]:
        walk, texts = self._forward, self._texts
        heads = self._heads()
        others = [name for name in walk.others if name not in heads]
        yield from self._stored(others, {}, bar)
        leaves = self._leaves(others)
        vectors = [walk.embed(leaves, ids) for ids in texts]
        for number, names in enumerate(walk.layers):
            found = self._inputs(names, partial(walk.layer, number), leaves, vectors, bar)
            yield from self._stored(names, found, bar)
            after = leaves | self._leaves(names)
            for i, ids in enumerate(texts):
                vectors[i] = jax.block_until_ready(walk.layer(number, after, vectors[i], ids))
                bar.update(self._reading(names, ids))
            self._forget(names)
        if heads:
            found = self._inputs(heads, walk.finish, leaves, vectors, bar)
            yield from self._stored(heads, found, bar)

    def _heads(self) -> list[str]:
        """The heads that are quantized for their inputs."""
        pairs = zip(self._model.names, self._model.roles, strict=True)
        return [name for name, role in pairs if role == "head" and self._kind(name)]

    def _work(self) -> float:
        """Estimate the total time, in seconds of a core."""
        firsts = dict.fromkeys(self.same.values())
        storing = sum(self._storing(name) for name in firsts)
        layers = [name for names in self._forward.layers for name in names]
        names = [*layers, *layers, *self._heads()]
        return storing + sum(self._reading(names, ids) for ids in self._texts)

    def _storing(self, name: str) -> float:
        return per_weight(self._storages.get(name)) * prod(self._shapes[name])

    def _reading(self, names: Sequence[str], ids: Texts) -> float:
        """Estimated time of a forward pass of some texts through some parameters."""
        weights = sum(prod(self._shapes[name]) for name in names)
        return weights * ids.size * PER_PRODUCT / PASSES

    def _kind(self, name: str) -> Kind | None:
        """Return the kind of statistics that a parameter's inputs need."""
        storage = self._storages.get(name)
        if storage is None or storage.as_in_file:
            return None
        if storage.method == "gptq":
            return "products"
        # A search needs the squares alone, the report of what is lost all products.
        return "products" if self._weighed and storage.method == "mse" else None

    def _inputs(
        self,
        names: Sequence[str],
        run: Callable[[Leaves, Vectors, Texts], Any],
        others: Leaves,
        vectors: Sequence[Vectors],
        bar: Task,
    ) -> dict[str, InputStats]:
        """Statistics of the inputs of some weights over all texts."""
        kinds = {name: self._kind(name) for name in names}
        tapped = {
            name: leaf if (kind := kinds[name]) is None else record_inputs(leaf, kind)
            for name, leaf in self._plain(names).items()
        }
        for x, ids in zip(vectors, self._texts, strict=True):
            jax.block_until_ready(run({**others, **tapped}, x, ids))
            bar.update(self._reading(names, ids))
        taps = {name: leaf for name, leaf in tapped.items() if isinstance(leaf, RecordedWeight)}
        found = {name: leaf.inputs() for name, leaf in taps.items()}
        return {name: known(stats) for name, stats in found.items() if stats.rows.any()}

    def _stored(
        self, names: Sequence[str], inputs: Mapping[str, InputStats], bar: Task
    ) -> Iterator[tuple[str, Any]]:
        """Parameters as they are to be stored, which are added to `_known`."""
        firsts = [name for name in names if self.same[name] == name]
        with ThreadPoolExecutor(_THREADS) as pool:
            tensors = pool.map(lambda name: self._quantized(name, inputs.get(name)), firsts)
            for name, tensor in zip(firsts, tensors, strict=True):
                self._known[name] = self._usable(name, tensor)
                bar.update(self._storing(name))
                yield name, tensor

    def _quantized(self, name: str, inputs: InputStats | None) -> Any:
        origin, storage = self._origins[name], self._storages.get(name)
        if storage is not None and storage.method == "gptq" and inputs is None:
            storage = replace(storage, method="mse")  # nothing was multiplied with it
        values = read_parameter(self._model, origin, storage, inputs, self._watched(name))
        origin.release()
        return values

    def _usable(self, name: str, tensor: Any) -> Any:
        """A parameter for the forward pass: tables as they are stored, all else in float32."""
        role = self._model.roles[self._model.names.index(name)]
        tensor = jax.device_put(tensor)
        if isinstance(tensor, QuantizedTensor | OutlierTensor | ReorderedTensor | ScaledTensor):
            return tensor if role == "table" else tensor.dequantize()
        return tensor.astype(jnp.float32)

    def _leaves(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._known[self.same[name]] for name in names}

    def _plain(self, names: Sequence[str]) -> dict[str, Any]:
        """Parameters before they are quantized, or as they are if that has been done."""
        found = {}
        for name in names:
            known = self._known.get(self.same[name])
            if known is None:
                where = self._model, self._origins[name], self._shapes
                if name in self._storages:
                    values = values_to_quantize(*where)
                else:
                    values = read_values(*where, np.dtype(np.float32))
                known = jnp.asarray(values, jnp.float32)
            found[name] = known
        return found

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            if self.same[name] not in self._often:
                del self._known[name]


def known(inputs: InputStats) -> InputStats:
    """Inputs in which experts that no token chose have statistics of equal inputs."""
    if inputs.rows.all():
        return inputs
    mean = np.array(inputs.mean)
    products = mean.ndim == inputs.rows.ndim + 2
    mean[inputs.rows == 0] = np.eye(mean.shape[-1]) if products else 1
    return InputStats(mean, inputs.rows)
