"""Cache of quantized weights: what takes long to quantize is written once, and mapped from then on.

An entry is a native checkpoint, so that whoever reads weights sees only checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

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
    folder, gptq = cache_root(), bool(gptq_names(plan.storages))
    key = entry_key(plan, _GPTQ_VERSION if gptq else _SEARCH_VERSION)
    entry = find_entry(folder, key)
    if entry is not None:
        return entry
    if gptq:
        _check_gptq(plan)
    how = " with GPTQ" if gptq else ""
    _say(f"weights are quantized{how}, once; they are kept in {folder}")
    leaves = jax.tree.leaves(plan.model.parameters)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    shown, write = progress or sys.stderr.isatty(), _write_gptq if gptq else _write
    return add_entry(folder, key, size, lambda new: write(plan, new, shown))


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
    return cache_key(
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
    from jinfer.loader.weights.bit_budget import with_budget
    from jinfer.loader.weights.layer_forward import default_texts
    from jinfer.loader.weights.layerwise_gptq import LayerwiseGPTQ

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


MOST_BYTES = 64 << 30  # of all entries; those that were used least recently go first
_ROOM = 1 << 30  # bytes that an entry leaves free on the disk
_MARK = "sampled"
_UNFINISHED = "making-"
_STALE = 24 * 3600.0  # seconds after which one of these was left by a process that was killed
_EVERY, _SAMPLE = 1 << 20, 1 << 12
_SHARD = re.compile(r"(.*)-\d+-of-\d+(\.\w+)")


class NotCached(Exception):
    """Why there can be no entry, in a few words."""


class NotWanted(NotCached):
    """The user wants none."""


def cache_key(checkpoint: Checkpoint, *depends: Any) -> str:
    """The name of an entry.

    Args:
        depends: all that its numbers depend on beside the checkpoint's files, each of which has a
            `repr` that says all of it.
    """
    said: list[Any] = [_identity(path) for path in _files(checkpoint.path)]
    said += checkpoint.merged
    return hashlib.sha256(repr((said, depends)).encode()).hexdigest()[:40]


def _files(path: Path) -> list[Path]:
    """The files that a checkpoint may have been read from."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file())
    if path.name.endswith(".index.json"):
        return _files(path.parent)
    if shard := _SHARD.fullmatch(path.name):
        return sorted(path.parent.glob(f"{shard[1]}-*-of-*{shard[2]}"))
    return [path]


def _identity(path: Path) -> tuple[Any, ...]:
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


def cache_root() -> Path:
    """Where entries are: $JINFER_CACHE or the user's cache folder, and in it "weights".

    Raises:
        NotCached: there is no such folder that is the user's alone and can be written to.
    """
    path = _place()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NotCached(f"{path} is not a folder of yours")
        if found.st_mode & 0o077:
            path.chmod(0o700)
            if found.st_mode & 0o022:  # others may have written what is in it
                for each in path.iterdir():
                    _remove(each)
    except OSError as error:
        raise NotCached(f"{path} cannot be used: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise NotCached(f"{path} cannot be written to")
    return path


def _place() -> Path:
    chosen = os.environ.get("JINFER_CACHE", "")
    if chosen == "off":
        raise NotWanted("JINFER_CACHE is off")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise NotCached("there is no home folder; set JINFER_CACHE") from None
    return (Path(chosen).expanduser() if chosen else Path(base) / "jinfer") / "weights"


def find_entry(parent: Path, key: str) -> NativeCheckpoint | None:
    """An entry, if there is one that is whole; one that is not is removed."""
    entry = parent / key
    if not entry.is_dir():
        return None
    try:
        if (entry / _MARK).read_text(encoding="utf-8") == _sampled(entry):
            found = open_checkpoint(entry)
            if isinstance(found, NativeCheckpoint):
                with suppress(OSError):
                    os.utime(entry)
                return found
    except (OSError, UnicodeDecodeError, CheckpointError):
        pass
    _remove(entry)
    return None


def add_entry(
    parent: Path, key: str, nbytes: int, write: Callable[[Path], None]
) -> NativeCheckpoint:
    """A new entry.

    Args:
        nbytes: that it takes, about.
        write: writes its files to a folder.

    Raises:
        NotCached: there is no room for it.
    """
    _make_room(parent, nbytes)
    with _unfinished(parent) as scratch:
        write(scratch)
        (scratch / _MARK).write_text(_sampled(scratch), encoding="utf-8")
        for path in scratch.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        entry = parent / key
        _remove(entry)
        with suppress(OSError):  # another process was faster
            scratch.rename(entry)
    found = find_entry(parent, key)
    if found is None:
        raise NotCached(f"{entry} cannot be read back")
    return found


@contextmanager
def _unfinished(parent: Path) -> Iterator[Path]:
    for path in parent.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                _remove(path)
    scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    try:
        yield scratch
    finally:
        _remove(scratch)


def _make_room(parent: Path, nbytes: int) -> None:
    """Removes the entries used least recently until a new one fits."""
    entries = sorted(
        (path for path in parent.iterdir() if not path.name.startswith(_UNFINISHED)),
        key=lambda path: path.stat().st_mtime,
    )
    sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in entries]
    total = sum(sizes)
    for path, size in zip(entries, sizes, strict=True):
        free = shutil.disk_usage(parent).free
        if total + nbytes <= MOST_BYTES and free >= nbytes + _ROOM:
            break
        _remove(path)
        total -= size
    if nbytes > MOST_BYTES or shutil.disk_usage(parent).free < nbytes + _ROOM:
        raise NotCached(f"{parent} has no room for {nbytes / 2**30:.1f} GiB")


def _sampled(entry: Path) -> str:
    """A digest of the files' names, sizes, ends, and of a part of every megabyte."""
    digest = hashlib.sha256()
    for path in sorted(entry.iterdir()):
        if path.name == _MARK:
            continue
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for begin in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
                file.seek(begin)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
