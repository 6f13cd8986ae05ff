"""Prefix cache offload of a model: the stores that its specification asks for."""

from __future__ import annotations

import os
from pathlib import Path

from jinfer.distributed.current_group import current_group
from jinfer.engine.engine import Engine
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.quantized_cache import entry_key
from jinfer.modelspec.spec_errors import SpecError

_GIB = 1 << 30


def start_offload(engine: Engine, plan: WeightPlan) -> None:
    """Connects an engine with the stores that `[engine]` asks for, if any.

    Raises:
        SpecError: a store cannot be had.
    """
    asked, path = plan.spec.engine, plan.spec.path
    if not engine.model.caches:
        return
    engine.weights_key = entry_key(plan, "kv cache")
    ram, disk = int(asked.cache_ram * _GIB), None
    if not ram and asked.cache_disk is None:
        return
    # Imported here, because most models ask for none.
    from jinfer.engine.offload.cache_identity import cache_identity
    from jinfer.engine.offload.disk_store import FOLDER, DiskStore, FolderRefusedError
    from jinfer.engine.offload.prefix_offload import PrefixOffload

    if ram > (most := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        reason = (
            f"{asked.cache_ram:g} GiB are more than the {most / _GIB:.0f} of this machine; "
            "it counts GiB, not MiB"
        )
        raise SpecError(path, "engine.cache_ram", reason)
    if reason := offload_refusal(engine):
        key = "cache_ram" if ram else "cache_disk"
        raise SpecError(path, f"engine.{key}", f"cannot be had {reason}")
    if asked.cache_disk is not None:
        folder = Path(asked.cache_disk).expanduser()
        try:
            identity = cache_identity(engine.programs, engine.weights_key)
            disk = DiskStore(folder, identity, int(asked.cache_disk_size * _GIB))
        except FolderRefusedError as error:
            raise SpecError(path, "engine.cache_disk", f"{folder}: its {FOLDER} {error}") from None
    engine.offload = PrefixOffload(engine, ram, disk)


def offload_refusal(engine: Engine) -> str:
    """Why blocks cannot be taken from an engine's devices and put back; "": they can."""
    if current_group() is not None:
        return "with several processes, each of which has a part of the cache; leave it out"
    if engine.programs.pipeline is not None and engine.programs.pipeline.hosted:
        return "with partition.host_kv_cache; leave one of them out"
    return ""
