"""Cache of quantized weights: slow quantization runs once; later starts map the result from disk.

An entry is a folder with a native checkpoint, so loading it is loading any other checkpoint. Its
name is a digest of everything that its numbers depend on.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.disk_cache import (
    CacheOffError,
    FolderCache,
    NoCacheError,
    cache_folder,
    private_folder,
)
from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import (
    NativeCheckpoint,
    PackedFormat,
    native_metadata,
)
from jinfer.loader.checkpoint.safetensors import Writer
from jinfer.loader.weights.native_parameters import packing, part_names, weight_settings
from jinfer.loader.weights.plan_weights import (
    TOKENS,
    WeightPlan,
    gptq_names,
    native_plan,
    obstacle,
    without_gptq,
)
from jinfer.loader.weights.read_weights import read
from jinfer.loader.weights.tensor_mapping import parameter_shapes
from jinfer.progress import line
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor

# Change where the same weights would get other codes.
_SEARCH_VERSION, _GPTQ_VERSION = "search 1", 2
_LEAST_WEIGHTS = 1 << 26  # quantized weights that are worth an entry: some seconds of two cores
_SHARD_BYTES = 1 << 30  # of a file, which memory holds until it is written
_LIMIT = 64 << 30  # bytes of all entries
_SPARE = 1 << 30  # bytes that an entry leaves free on the disk
_SAMPLE = 1 << 12  # bytes of each megabyte in an entry's digest: hashing all would slow each start
_SHARD = re.compile(r"(.*)-\d+-of-\d+(\.\w+)")


def cached(plan: WeightPlan, *, progress: bool = False) -> WeightPlan:
    """The plan over a native checkpoint of the cache, which is written now if there is none yet.

    Where GPTQ cannot be, weights are quantized by a search. Plans that take little time to
    quantize, or cannot be cached, are given back; a line on standard error says why.
    """
    if gptq_names(plan.storages):
        try:
            return native_plan(plan, _entry(plan, progress))
        except NoCacheError as reason:
            _say(f"{reason}; weights are quantized without GPTQ")
            plan = replace(plan, storages=without_gptq(plan.storages))
    if not _takes_long(plan):
        return plan
    try:
        return native_plan(plan, _entry(plan, progress))
    except CacheOffError:
        return plan
    except (NoCacheError, OSError) as reason:
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
    count = sum(
        prod(shapes[name]) for name, storage in plan.storages.items() if not storage.as_in_file
    )
    return count >= _LEAST_WEIGHTS and jax.process_count() == 1


def _entry(plan: WeightPlan, progress: bool) -> NativeCheckpoint:
    """Find or write the native checkpoint of a plan.

    Raises:
        NoCacheError: there can be none.
    """
    cache = FolderCache(private_folder(cache_folder("weights")), _LIMIT, _SAMPLE)
    gptq = bool(gptq_names(plan.storages))
    key = entry_key(plan, _GPTQ_VERSION if gptq else _SEARCH_VERSION)
    if (found := _opened(cache, key)) is not None:
        return found
    if gptq:
        _check_gptq(plan)
    with cache.lock(key, _waiting):
        if (found := _opened(cache, key)) is not None:
            return found
        how = " with GPTQ" if gptq else ""
        _say(f"weights are quantized{how}, once; they are kept in {cache.folder}")
        leaves = jax.tree.leaves(plan.model.parameters)
        cache.make_room(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), _SPARE)
        with cache.new(key) as folder:
            (_write_gptq if gptq else _write)(plan, folder, progress or sys.stderr.isatty())
    if (found := _opened(cache, key)) is None:
        raise NoCacheError(f"{cache.folder / key} cannot be read back")
    return found


def _opened(cache: FolderCache, key: str) -> NativeCheckpoint | None:
    """Open an entry; one that is no native checkpoint is removed."""
    if (folder := cache.find(key)) is None:
        return None
    try:
        found = open_checkpoint(folder)
    except CheckpointError:
        found = None
    if isinstance(found, NativeCheckpoint):
        return found
    cache.drop(key)
    return None


def _waiting() -> AbstractContextManager[None]:
    _say("another process quantizes the same weights; waiting for it")
    return nullcontext()


def entry_key(plan: WeightPlan, version: int | str) -> str:
    """Name a plan's entry.

    Args:
        version: of the quantizer.
    """
    spec = plan.spec
    types = [str(parameter.dtype) for parameter in plan.plain.parameters]
    formats = [
        (name, replace(storage, activations="float"), storage.columns)
        for name, storage in plan.storages.items()
    ]
    built = (sorted(spec.dims.items()), spec.shared, spec.stacks, spec.tensors)
    budget = spec.quantization.budget
    return key_of(
        plan.checkpoint, version, built, types, formats, *([] if budget is None else [budget])
    )


def key_of(checkpoint: Checkpoint, *depends: Any) -> str:
    """Name an entry by a digest of its checkpoint's files (path, size, time) and other values.

    Args:
        depends: everything else that its numbers depend on; each has a complete `repr`.
    """
    files: list[Any] = []
    for path in _files(checkpoint.path):
        status = path.stat()
        files.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    files += checkpoint.merged
    return hashlib.sha256(repr((files, depends)).encode()).hexdigest()[:40]


def _files(path: Path) -> list[Path]:
    """The files that a checkpoint may have been read from."""
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.is_file())
    if path.name.endswith(".index.json"):
        return _files(path.parent)
    if shard := _SHARD.fullmatch(path.name):
        return sorted(path.parent.glob(f"{shard[1]}-*-of-*{shard[2]}"))
    return [path]


def _write(plan: WeightPlan, folder: Path, progress: bool) -> None:
    """Quantizes each parameter by itself."""
    writer = EntryWriter(plan, folder)
    read(plan, lambda names, values: writer.add(names[0], values), progress=progress)
    writer.finish()


def _write_gptq(plan: WeightPlan, folder: Path, progress: bool) -> None:
    """Quantizes layer by layer."""
    # Here: weights that are cached already need none of it.
    from jinfer.loader.weights.bit_budget import with_budget
    from jinfer.loader.weights.layer_forward import default_texts
    from jinfer.loader.weights.layerwise_gptq import LayerwiseGPTQ

    writer, texts = EntryWriter(plan, folder), default_texts(plan, progress=progress)
    plan = with_budget(plan, texts, progress=progress)
    for name, tensor in LayerwiseGPTQ(plan, texts, progress=progress):
        writer.add(name, tensor)
    writer.finish()


def _check_gptq(plan: WeightPlan) -> None:
    """Raises `NoCacheError` where GPTQ cannot be."""
    free = sys.maxsize if plan.free_memory is None else plan.free_memory()
    reason = obstacle(plan.plain, plan.spec, plan.storages, TOKENS, free)
    if reason is not None:
        raise NoCacheError(reason)


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
