"""Weights quantized layer by layer, each for the inputs that the layers before it give.

The layers before are quantized already, so a layer makes up for their errors as far as its inputs
show them, which is how GPTQ (arXiv 2210.17323) goes through a model. Memory holds one layer in
float32, the products of its inputs, and the vectors of all tokens between two layers.
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

from jinfer.checkpoint.mapped_file import release
from jinfer.nn.abstract_model import AbstractModel
from jinfer.progress import Task, task
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import Inputs, Kind, Recorded, tap
from jinfer.weights.chunked_quantize import Watch
from jinfer.weights.layer_forward import Leaves, Texts, Vectors, Walk
from jinfer.weights.load_time import PASSES, PER_PRODUCT, per_weight
from jinfer.weights.load_weights import parameter_shapes, read_parameter, read_values, same_arrays
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import Origin

_THREADS = min(4, os.cpu_count() or 1)

# Is given what each piece of a parameter was quantized from, by the parameter's name.
type Watched = Callable[[str], Watch | None]


class Sequential:
    """The parameters of a model as they are to be stored, in the order in which they are found."""

    def __init__(
        self,
        model: AbstractModel,
        plain: AbstractModel,
        stack: str,
        origins: Mapping[str, Origin],
        storages: Mapping[str, Storage],
        texts: Sequence[Texts],
        *,
        weighed: bool = False,
        watched: Watched = lambda name: None,
        progress: bool = False,
    ) -> None:
        """
        Args:
            model: its parameters in the types that those are to have that are not quantized.
            plain: the same in float32, which computes.
            stack: the one that the model has.
            origins, storages: as `load` takes them.
            texts: what the model reads.
            weighed: a search counts the error of each weight by the squares of its inputs.
            progress: show a bar.
        """
        self._model, self._walk = model, Walk(plain, stack)
        self._origins, self._storages, self._texts = origins, storages, texts
        self._weighed, self._watched, self._progress = weighed, watched, progress
        self._shapes = parameter_shapes(model)
        self.same = same_arrays(model, origins, storages)
        firsts = list(self.same.values())
        self._often = {name for name in firsts if firsts.count(name) > 1}
        # By names of firsts, in float32 or as they are stored: what later layers need as well.
        self._known: dict[str, Any] = {}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Each parameter that is none of the same array as one before: a tensor of NumPy arrays."""
        with task("quantizing", self._work(), unit="%", shown=self._progress or None) as bar:
            yield from self._found(bar)

    def _found(self, bar: Task) -> Iterator[tuple[str, Any]]:
        walk, texts = self._walk, self._texts
        heads = self._heads()
        others = [name for name in walk.others if name not in heads]
        yield from self._stored(others, {}, bar)
        leaves = self._leaves(others)
        vectors = [walk.embed(leaves, ids) for ids in texts]
        for number, names in enumerate(walk.layers):
            run = partial(self._through, number, leaves)
            yield from self._stored(names, self._inputs(names, run, vectors, bar), bar)
            after = leaves | self._leaves(names)
            for i, ids in enumerate(texts):
                vectors[i] = jax.block_until_ready(walk.layer(number, after, vectors[i], ids))
                bar.update(self._reading(names, ids))
            self._forget(names)
        if heads:
            run = partial(self._end, leaves)
            yield from self._stored(heads, self._inputs(heads, run, vectors, bar), bar)

    def _heads(self) -> list[str]:
        """Those of which inputs have to be known."""
        each = zip(self._model.names, self._model.roles, strict=True)
        return [name for name, role in each if role == "head" and self._kind(name)]

    def _work(self) -> float:
        """Seconds of a core that all takes, about."""
        firsts = dict.fromkeys(self.same.values())
        storing = sum(self._storing(name) for name in firsts)
        layers = [name for names in self._walk.layers for name in names]
        names = [*layers, *layers, *self._heads()]
        return storing + sum(self._reading(names, ids) for ids in self._texts)

    def _storing(self, name: str) -> float:
        return per_weight(self._storages.get(name)) * prod(self._shapes[name])

    def _reading(self, names: Sequence[str], ids: Texts) -> float:
        """Of some tokens by some parameters, once."""
        weights = sum(prod(self._shapes[name]) for name in names)
        return weights * ids.size * PER_PRODUCT / PASSES

    def _through(self, number: int, others: Leaves, own: Leaves, x: Vectors, ids: Texts) -> Vectors:
        return self._walk.layer(number, {**others, **own}, x, ids)

    def _end(self, others: Leaves, own: Leaves, x: Vectors, ids: Texts) -> Any:
        return self._walk.finish({**others, **own}, x, ids)

    def _kind(self, name: str) -> Kind | None:
        """What has to be known of a parameter's inputs."""
        storage = self._storages.get(name)
        if storage is None or storage.kept:
            return None
        if storage.method == "feedback":
            return "products"
        # A search needs the squares alone; whoever is told how much is lost needs all products.
        return "products" if self._weighed and storage.method == "search" else None

    def _inputs(
        self,
        names: Sequence[str],
        run: Callable[[Leaves, Vectors, Texts], Any],
        vectors: Sequence[Vectors],
        bar: Task,
    ) -> dict[str, Inputs]:
        """What weights are multiplied with while the texts are read."""
        kinds = {name: self._kind(name) for name in names}
        tapped = {
            name: leaf if (kind := kinds[name]) is None else tap(leaf, kind)
            for name, leaf in self._plain(names).items()
        }
        for x, ids in zip(vectors, self._texts, strict=True):
            jax.block_until_ready(run(tapped, x, ids))
            bar.update(self._reading(names, ids))
        taps = {name: leaf for name, leaf in tapped.items() if isinstance(leaf, Recorded)}
        found = {name: leaf.inputs() for name, leaf in taps.items()}
        return {name: known(each) for name, each in found.items() if each.rows.any()}

    def _stored(
        self, names: Sequence[str], inputs: Mapping[str, Inputs], bar: Task
    ) -> Iterator[tuple[str, Any]]:
        """Parameters as they are to be stored; `_known` has them afterwards."""
        firsts = [name for name in names if self.same[name] == name]
        with ThreadPoolExecutor(_THREADS) as pool:
            one = pool.map(lambda name: self._one(name, inputs.get(name)), firsts)
            for name, tensor in zip(firsts, one, strict=True):
                self._known[name] = self._usable(name, tensor)
                bar.update(self._storing(name))
                yield name, tensor

    def _one(self, name: str, inputs: Inputs | None) -> Any:
        origin, storage = self._origins[name], self._storages.get(name)
        if storage is not None and storage.method == "feedback" and inputs is None:
            storage = replace(storage, method="search")  # nothing was multiplied with it
        values = read_parameter(self._model, origin, storage, inputs, self._watched(name))
        for file in origin.files:
            release(file.raw())
        return values

    def _usable(self, name: str, tensor: Any) -> Any:
        """A parameter as the walk takes it: a table as it is stored, all else in float32."""
        role = self._model.roles[self._model.names.index(name)]
        tensor = jax.device_put(tensor)
        if isinstance(tensor, QuantizedTensor | OutlierTensor):
            return tensor if role == "table" else tensor.dequantize()
        return tensor.astype(jnp.float32)

    def _leaves(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._known[self.same[name]] for name in names}

    def _plain(self, names: Sequence[str]) -> dict[str, Any]:
        """Parameters before they are quantized; those that are already, as they are."""
        found = {}
        for name in names:
            known = self._known.get(self.same[name])
            if known is None:
                dtype = np.dtype(np.float32)
                values = read_values(self._model, self._origins[name], self._shapes, dtype)
                known = jnp.asarray(values, jnp.float32)
            found[name] = known
        return found

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            if self.same[name] not in self._often:
                del self._known[name]


def known(inputs: Inputs) -> Inputs:
    """With all inputs alike for the matrices of a stack that met none."""
    if inputs.rows.all():
        return inputs
    mean = np.array(inputs.mean)
    products = mean.ndim == inputs.rows.ndim + 2
    mean[inputs.rows == 0] = np.eye(mean.shape[-1]) if products else 1
    return Inputs(mean, inputs.rows)
