"""LoRA adapters of a loaded model: loading, unloading and finding them by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.api.build_engine import place_parameters
from jinfer.api.model_weights import ModelWeights
from jinfer.engine.engine import Engine
from jinfer.engine.engine_thread import EngineThread
from jinfer.engine.requests import AdapterUse, EngineError, RequestError
from jinfer.loader.model_files import merged_checkpoint
from jinfer.loader.open_model import Opened, adapter_dtype
from jinfer.loader.sources import locate
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.nn.abstract_model import AbstractModel, with_adapters
from jinfer.nn.lora_rows import AdapterSlots, is_adapter
from jinfer.parallel.distributed.current_group import current_group

if TYPE_CHECKING:
    from jinfer.loader.adapters.lora_adapter import LoraAdapter

_RANKS = (16, 32, 64, 128, 256, 512)  # ranks that adapters are padded to
_USUAL_RANK = 64
_MOST = 1024
_MOST_SCALE = 1e6


def with_merged_adapters(opened: Opened, model: AbstractModel) -> Opened:
    """The model with the adapters that its specification merges in its checkpoint's tensors.

    Raises:
        CheckpointError, LoadError: an adapter is damaged, or of another model.
    """
    tensors = opened.spec.tensors
    checkpoint = merged_checkpoint(opened.checkpoint, opened.adapters, model, tensors)
    return replace(opened, checkpoint=checkpoint)


@dataclass
class Adapters:
    """The LoRA adapters of a model.

    Attributes:
        names: how the model's checkpoint names its tensors.
        form: the checkpoint's format.
        listed: name -> adapter of the specification, which is loaded with the model.
        slots: how many there can be, and of which rank; None: none.
        loaded: name -> where each is.
    """

    names: TensorMap
    form: str
    listed: Mapping[str, LoraAdapter]
    slots: AdapterSlots | None
    loaded: dict[str, AdapterUse] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    _stacks: dict[str, np.ndarray] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, opened: Opened) -> Adapters:
        """Those that a specification names, none loaded yet.

        Raises:
            SpecError: the model cannot have any.
            CheckpointError: one of them is damaged.
        """
        unmerged = [adapter for adapter in opened.adapters if not adapter.spec.merge]
        listed = {item.spec.name: _opened(item.path) for item in unmerged}
        engine, path = opened.spec.engine, opened.spec.path
        model = opened.spec.tensors, opened.checkpoint.format
        count = max(engine.max_adapters, len(listed))
        if not count:
            return cls(*model, {}, None)
        key = "engine.max_adapters" if engine.max_adapters else "adapters"
        if count > _MOST:
            raise SpecError(path, key, f"{count} adapters are too many; at most {_MOST} have room")
        if opened.spec.type != "decoder-only":
            reason = "only merged adapters go with an encoder; set merge = true"
            raise SpecError(path, key, reason)
        if current_group() is not None:
            raise SpecError(path, key, "adapters are not loaded in several processes; merge them")
        highest = max((item.rank for item in listed.values()), default=0)
        usual = next((rank for rank in _RANKS if rank >= highest), highest)
        rank = engine.max_adapter_rank or (usual if listed else _USUAL_RANK)
        experts = engine.expert_adapters or any(item.has_experts for item in listed.values())
        dora = engine.dora_adapters or any(item.has_magnitudes for item in listed.values())
        slots = AdapterSlots(count, rank, adapter_dtype(opened.spec), experts, dora)
        adapters = cls(*model, listed, slots)
        adapters.sources |= {item.spec.name: str(item.path) for item in unmerged}
        return adapters

    def room_in(self, model: AbstractModel) -> AbstractModel:
        """The model with room for them."""
        return model if self.slots is None else with_adapters(model, self.slots)

    def load_listed(self, engine: Engine, thread: EngineThread) -> None:
        """Loads those of the specification, once the model is loaded."""
        if self.slots is None:
            return
        parameters = zip(engine.runner.model.names, engine.runner.model.parameters, strict=True)
        self._stacks = {n: np.zeros(p.shape, p.dtype) for n, p in parameters if is_adapter(n)}
        for name, adapter in self.listed.items():
            self._load(name, adapter, engine, thread)

    def restore(self, engine: Engine) -> None:
        """Gives an engine whose weights were loaded again those that were loaded before."""
        if self._stacks:
            place_parameters(engine, self._stacks)

    def load(self, name: object, source: object, engine: Engine, thread: EngineThread) -> None:
        """As `LLM.load_adapter`."""
        if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable():
            raise RequestError(f"an adapter's name is {show_value(name)}; give a short text")
        if not isinstance(source, str | Path) or not str(source):
            raise RequestError(f"an adapter's source is {show_value(source)}; give a path")
        if self.slots is None:
            raise RequestError("there is no room for adapters; open it with engine.max_adapters")
        if name in self.loaded:
            raise RequestError(f"there is an adapter {name!r} already; unload it first")
        path = locate(str(source), Path.cwd())
        self._load(name, _opened(path), engine, thread)
        self.sources[name] = str(path)

    def _load(self, name: str, adapter: LoraAdapter, engine: Engine, thread: EngineThread) -> None:
        from jinfer.loader.adapters.adapter_terms import adapter_terms, stacked, with_norms

        terms = adapter_terms(adapter, engine.runner.model, self.names, self.form)
        if adapter.has_magnitudes:
            terms = with_norms(terms, _weights(engine, thread, adapter), adapter.path)
        with self._changing:
            if name in self.loaded:
                raise RequestError(f"there is an adapter {name!r} already; unload it first")
            slot = self._free_slot(engine, thread)
            self._stacks |= stacked(terms, slot - 1, self._stacks, adapter.path)
            thread.run(partial(_place, self._stacks, slot, adapter.digest))
            self.loaded[name] = AdapterUse(name, slot, adapter.digest)

    def unload(self, name: object) -> None:
        """As `LLM.unload_adapter`."""
        with self._changing:
            self.find(name)
            del self.loaded[str(name)], self.sources[str(name)]

    def find(self, name: object, scale: float = 1.0) -> AdapterUse:
        """The adapter of that name. Raises `RequestError` if there is none."""
        if not isinstance(name, str) or (found := self.loaded.get(name)) is None:
            known = nearest_hint(str(name), self.loaded) if self.loaded else "none is loaded"
            raise RequestError(f"there is no adapter {show_value(name)}; {known}")
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not number or not abs(scale) <= _MOST_SCALE:
            raise RequestError(f"an adapter's scale is {show_value(scale)}; give a number")
        return replace(found, scale=float(scale))

    def _free_slot(self, engine: Engine, thread: EngineThread) -> int:
        assert self.slots is not None, "there is room for adapters"
        named = {use.slot for use in self.loaded.values()}
        used = thread.run(lambda engine: engine.adapter_slots_used())
        free = [n for n in range(1, self.slots.count + 1) if n not in named and n not in used]
        if not free:
            reason = f"{len(named)} adapters are loaded, and there is room for {self.slots.count}"
            if len(named) < self.slots.count:
                reason += ", but requests of unloaded ones still run: try again"
            raise RequestError(f"{reason}; unload one, or set engine.max_adapters")
        return free[0]


def _opened(path: Path) -> LoraAdapter:
    # Imported here, and where adapters are loaded, because most models have none.
    from jinfer.loader.adapters.lora_adapter import open_adapter

    return open_adapter(path)


def _weights(
    engine: Engine, thread: EngineThread, adapter: LoraAdapter
) -> Callable[[str], np.ndarray]:
    """What gives the matrices of an engine's projections."""
    weights = ModelWeights(engine, thread, {}, {})

    def weight_of(projection: str) -> np.ndarray:
        try:
            return weights[projection].values
        except EngineError as error:
            reason = "magnitudes (DoRA) need the weights on one device"
            raise RequestError(f"{adapter.path}: {reason}, and {error}; or merge it") from None

    return weight_of


def _place(stacks: Mapping[str, np.ndarray], slot: int, digest: bytes, engine: Engine) -> Any:
    place_parameters(engine, stacks)
    engine.adapters[slot] = digest
