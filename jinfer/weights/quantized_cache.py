"""Cache of quantized weights: what takes long to quantize is written once, and mapped from then on.

An entry is a native checkpoint, so that whoever reads weights sees only checkpoints.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint.native_checkpoint import NativeCheckpoint, PackedFormat, native_metadata
from jinfer.progress import line
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.weights import cache_folder
from jinfer.weights.cache_folder import NotCached, NotWanted
from jinfer.weights.choose_method import TOKENS, gptq_names, obstacle, without_gptq
from jinfer.weights.native_parameters import packing, part_names, weight_settings
from jinfer.weights.plan_weights import WeightPlan, native_plan
from jinfer.weights.read_weights import read
from jinfer.weights.safetensors_writer import Writer
from jinfer.weights.tensor_mapping import parameter_shapes

# Change where the same weights would get other codes.
_SEARCH_VERSION, _GPTQ_VERSION = "search 1", 2
_LEAST_WEIGHTS = 1 << 26  # quantized weights that are worth an entry: some seconds of two cores
_SHARD_BYTES = 1 << 30  # of a file, which memory holds until it is written


def cached(plan: WeightPlan, *, progress: bool = False) -> WeightPlan:
    """The plan over a native checkpoint of the cache, which is written now if there is none yet.

    Where GPTQ cannot be, weights are quantized by a search. Plans that take little time to
    quantize, or cannot be cached, are given back; a line on standard error says why.
    """
    if gptq_names(plan.storages):
        try:
            return native_plan(plan, _entry(plan, progress))
        except NotCached as reason:
            _say(f"{reason}; weights are quantized without GPTQ")
            plan = replace(plan, storages=without_gptq(plan.storages))
    if not _takes_long(plan):
        return plan
    try:
        return native_plan(plan, _entry(plan, progress))
    except NotWanted:
        return plan
    except (NotCached, OSError) as reason:
        _say(f"{reason}; weights are quantized at each start")
        return plan


def with_formats(plan: WeightPlan, *, progress: bool = False) -> WeightPlan:
    """The plan, with the formats of its weights where they share a number of bits.

    The formats are found with the codes, and programs are compiled for formats: so weights are
    quantized before anything else is made of such a plan.
    """
    return plan if plan.spec.quantization.budget is None else cached(plan, progress=progress)


def _takes_long(plan: WeightPlan) -> bool:
    """Whether quantizing does, and this process reads all weights."""
    shapes = parameter_shapes(plan.plain)
    count = sum(prod(shapes[name]) for name, each in plan.storages.items() if not each.as_in_file)
    return count >= _LEAST_WEIGHTS and jax.process_count() == 1


def _entry(plan: WeightPlan, progress: bool) -> NativeCheckpoint:
    """The native checkpoint of a plan. Raises `NotCached` where there can be none."""
    folder, gptq = cache_folder.folder(), bool(gptq_names(plan.storages))
    key = entry_key(plan, _GPTQ_VERSION if gptq else _SEARCH_VERSION)
    entry = cache_folder.find(folder, key)
    if entry is not None:
        return entry
    if gptq:
        _check_gptq(plan)
    how = " with GPTQ" if gptq else ""
    _say(f"weights are quantized{how}, once; they are kept in {folder}")
    leaves = jax.tree.leaves(plan.model.parameters)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    shown, write = progress or sys.stderr.isatty(), _write_gptq if gptq else _write
    return cache_folder.make(folder, key, size, lambda new: write(plan, new, shown))


def entry_key(plan: WeightPlan, version: int | str) -> str:
    """The name of a plan's entry.

    Args:
        version: of the code that finds the numbers.
    """
    spec = plan.spec
    types = [str(parameter.dtype) for parameter in plan.plain.parameters]
    formats = [
        (name, replace(each, activations="float"), each.columns)
        for name, each in plan.storages.items()
    ]
    built = (sorted(spec.dims.items()), spec.shared, spec.stacks, spec.tensors)
    budget = spec.quantization.budget
    return cache_folder.key_of(
        plan.checkpoint, version, built, types, formats, *([] if budget is None else [budget])
    )


def _write(plan: WeightPlan, folder: Path, progress: bool) -> None:
    """Quantizes each parameter by itself."""
    writer = EntryWriter(plan, folder)
    read(plan, lambda names, values: writer.add(names[0], values), progress=progress)
    writer.finish()


def _write_gptq(plan: WeightPlan, folder: Path, progress: bool) -> None:
    """Quantizes layer by layer."""
    # Here: weights that are cached already need none of it.
    from jinfer.weights.bit_budget import with_budget
    from jinfer.weights.calibration_texts import default_texts
    from jinfer.weights.layerwise_gptq import LayerwiseGPTQ

    writer, texts = EntryWriter(plan, folder), default_texts(plan, progress=progress)
    plan = with_budget(plan, texts, progress=progress)
    for name, tensor in LayerwiseGPTQ(plan, texts, progress=progress):
        writer.add(name, tensor)
    writer.finish()


def _check_gptq(plan: WeightPlan) -> None:
    """Raises `NotCached` where GPTQ cannot be."""
    free = sys.maxsize if plan.free_memory is None else plan.free_memory()
    reason = obstacle(plan.plain, plan.spec, plan.storages, TOKENS, free)
    if reason is not None:
        raise NotCached(reason)


class EntryWriter:
    """Writes the parameters of a plan to `model.safetensors`, or several such files."""

    def __init__(self, plan: WeightPlan, folder: Path) -> None:
        self._plan, self._packed = plan, dict[str, PackedFormat]()
        self._writer, self._lock = Writer(folder, _SHARD_BYTES), threading.Lock()

    def add(self, name: str, tensor: Any) -> None:
        """Adds a parameter of NumPy's arrays; from any thread."""
        arrays = {part: np.asarray(array) for part, array in part_names(name, tensor)}
        with self._lock:
            self._writer.add(arrays)
            if isinstance(tensor, QuantizedTensor | OutlierTensor | ReorderedTensor):
                self._packed[name] = packing(tensor)

    def finish(self) -> None:
        """Writes what is left."""
        plan = self._plan
        # The specification is at hand whenever this is read, so nothing of the source is needed.
        source = replace(plan.checkpoint, tensors={}, metadata={})
        same = {name: first for name, first in plan.same.items() if name != first}
        settings = weight_settings(plan.spec.quantization)
        self._writer.finish(native_metadata(source, self._packed, same, settings))


def _say(text: str) -> None:
    line(f"jinfer: {text}")
