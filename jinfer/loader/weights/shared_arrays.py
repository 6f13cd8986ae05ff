"""Tied weights: parameters that are one array, because they come from the same place."""

from __future__ import annotations

from collections.abc import Mapping

from jinfer.loader.weights.native_parameters import Source
from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import parameter_shapes
from jinfer.nn.abstract_model import AbstractModel


def same_arrays(
    model: AbstractModel,
    origins: Mapping[str, Source],
    storages: Mapping[str, Storage],
) -> dict[str, str]:
    """Name of each parameter -> that of the first one which is the same array."""
    shapes = parameter_shapes(model)
    dtypes = dict(zip(model.names, (p.dtype for p in model.parameters), strict=True))
    sources = {
        name: (origin.source(shapes), dtypes[name], name in model.normalized, storages.get(name))
        for name, origin in origins.items()
    }
    firsts = {source: name for name, source in reversed(sources.items())}
    return {name: firsts[source] for name, source in sources.items()}
