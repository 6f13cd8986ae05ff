"""Model manager: the models of a server by name, in memory while requests use them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jinfer.api.user_errors import USER_ERRORS
from jinfer.distributed.current_group import current_group
from jinfer.engine.engine_stats import Stats
from jinfer.engine.thread_pools import start_threads
from jinfer.server.http import http_errors
from jinfer.server.http.http_errors import ApiError, RunsElsewhereError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_loading import examine
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.models.model_residency import ModelResidency
from jinfer.server.models.served_model import ServedModel

_WORKERS = 4
_ON_DEMAND = 4  # models in memory at a time where they are loaded on demand and no flag says it


class ModelManager:
    """All models of a server. Its methods are called on the event loop.

    Attributes:
        registry: where the models come from.
        residency: which of them are in memory.
        workers, compilers, waiters: thread pools for slow work, grammars, and waiting for engines.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        settings: ServerSettings,
        *,
        unloaded: Callable[[str, Stats], Any] = lambda name, last: None,
    ) -> None:
        """Load nothing yet.

        Args:
            unloaded: called with the name and last statistics of a model that is unloaded.

        Raises:
            SourceError, SpecError: the folder or the file of models cannot be read.
        """
        self.registry, self._settings = registry, settings
        models = [self._served(source) for source in registry.sources()]
        max_models = _most(models, settings.max_loaded, registry)
        self.residency = ModelResidency(models, max_models, settings, unloaded)
        self._any_name = not settings.strict and registry.is_fixed and len(models) == 1
        self._started = False
        # Slow work, such as tokenizing a long text, must not block the event loop.
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="worker")
        # Compiling a grammar can take seconds; a pool of its own delays only other grammars.
        self.compilers = ThreadPoolExecutor(2, thread_name_prefix="compiler")
        # Threads that wait for an engine must not occupy the workers of other requests.
        self.waiters = ThreadPoolExecutor(64, thread_name_prefix="waiter")

    @property
    def models(self) -> list[ServedModel]:
        """The models: those of the command line first, then of the file, then of the folder."""
        return self.residency.models

    @property
    def ready(self) -> bool:
        """Whether the models that are loaded at startup are there."""
        return self._started

    @property
    def come_and_go(self) -> bool:
        """Whether models are loaded on demand, or leave when others come or nobody asks them."""
        idle = self._settings.idle_unload is not None or self._settings.idle_sleep is not None
        few = self.residency.max_models < len(self.models)
        return not self.registry.is_fixed or few or idle or self._settings.is_worker

    def unavailable_reason(self) -> str:
        """Why loaded models do not answer (a process of the job is silent); "": they do."""
        group = current_group()
        return "" if group is None else group.complaint()

    async def start(self) -> None:
        """Load as many models as may be in memory, but for those that are loaded on demand.

        Raises:
            ApiError: a model cannot be loaded.
        """
        # Loading in the event loop would block other requests.
        start_threads(self.workers, _WORKERS)
        first = [model for model in self.models if not model.source.on_demand]
        first.sort(key=lambda model: not model.source.pinned)
        for model in first[: self.residency.max_models]:
            await self.residency.load(model)
            if model.state != "loaded":
                raise ApiError(503, model.error)
        self._started = self.residency.beside_others = True
        await self._examine([model for model in self.models if model.source.on_demand])

    def refuse_requests(self) -> None:
        """Refuse new requests; running ones continue."""
        self.residency.closed = True
        if (group := current_group()) is not None:
            group.is_leaving = True

    async def close(self) -> None:
        """Unload every model."""
        await self.residency.close()
        for pool in (self.workers, self.waiters, self.compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, Stats]:
        """The statistics of each loaded model, awake or asleep."""
        return {model.name: stats for model in self.models if (stats := model.stats) is not None}

    def notice_ends(self) -> None:
        """Note of models whose processes have ended by themselves that they are not loaded."""
        for model in self.models:
            self.residency.forget(model)

    async def refresh(self) -> None:
        """Ask the models' own processes for their statistics and adapters."""
        for model in self.models:
            if model.open and model.worker is not None:
                await self._in_worker(model.worker.stats)

    def by_name(self, name: str | None) -> ServedModel:
        """The model of that name; None: the first. Raises `ApiError` if there is none."""
        if name is None and self.models:
            return self._unnamed()
        for model in self.models:
            if name in model.names:
                return model
        for model in self.models:
            if name in model.adapters:
                return model
        raise http_errors.unknown_model(name or "", [model.name for model in self.models])

    def _unnamed(self) -> ServedModel:
        """The first model of the command line; else the one that was used last, or the first."""
        if self.registry.named:
            return self.models[0]
        return max(self.models, key=lambda model: (model.open, model.open and model.last_used))

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return sum(model.waiters for model in self.models)

    def find(self, name: str | None) -> ServedModel:
        """The model that a request means, of those that are known. Raises `ApiError`."""
        return self.models[0] if self._any_name else self.by_name(name)

    async def look_for(self, name: str | None) -> ServedModel:
        """The model that a request means; where there is none, it is looked for in the folder.

        Raises:
            ApiError: there is none.
        """
        try:
            return self.find(name)
        except ApiError:
            if self.registry.is_fixed and not self._settings.runtime_adapters:
                raise
        if self._settings.runtime_adapters:
            await self.refresh()  # the name of an adapter that came meanwhile
        if not self.registry.is_fixed:
            await self.reload()
        return self.by_name(name)

    def answers_to(self, name: str) -> bool:
        """Whether the only model answers requests for another name."""
        if not self._any_name:
            return False
        model = self.models[0]
        return name not in (*model.names, *model.adapters)

    @contextlib.asynccontextmanager
    async def use(
        self, name: str | None, *, keep: float | None = None
    ) -> AsyncIterator[ServedModel]:
        """The model for a request, loaded if needed and kept in memory meanwhile.

        Args:
            keep: seconds that it stays in memory afterwards; None: as its settings say.

        Raises:
            ApiError: the name is unknown, the model is still loading or could not be loaded, there
                is no room for it, the server is shutting down, or a process of the job does not
                respond.
            RunsElsewhereError: another process is to answer.
        """
        model = await self.look_for(name)
        self._check_open(model)
        if not self._settings.autoload and model.state == "unloaded":
            raise http_errors.model_not_loaded(model.name)
        async with self.hold(model):
            model.keep = self._keep(model.source) if keep is None else keep
            if model.worker is not None:
                raise RunsElsewhereError(model)
            yield model

    @contextlib.asynccontextmanager
    async def hold(self, model: ServedModel, *, awake: bool = True) -> AsyncIterator[ServedModel]:
        """Load a model, or wakes it, if needed, and keeps it in memory. Raises `ApiError`.

        Args:
            awake: whether one that sleeps is woken.
        """
        self.residency.forget(model)
        if awake or model.state != "sleeping":
            await self.residency.arrive(model)
        model.users += 1
        model.cancel_timers()
        model.last_used = time.monotonic()
        try:
            yield model
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            self.residency.rest(model)

    @contextlib.asynccontextmanager
    async def see(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model for a request that computes nothing: one that sleeps is not woken.

        Raises:
            ApiError: as `use`.
        """
        model = await self.look_for(name)
        if model.state == "sleeping":
            if model.worker is not None:
                raise RunsElsewhereError(model, awake=False)
            yield model
        else:
            async with self.use(name) as model:
                yield model

    async def load(self, name: str | None) -> ServedModel:
        """Load a model, or wakes it, unless it is there. Raises `ApiError`."""
        model = await self.look_for(name)
        self._check_open(model)
        await self.residency.arrive(model)
        return model

    async def unload(self, model: ServedModel) -> None:
        """Unload a model when the requests that use it have ended.

        Raises:
            ApiError: it is pinned, or of several processes.
        """
        _check_may_leave(model, "unloaded")
        if model.source.pinned:
            reason = f"{model.name} is pinned, so that it stays in memory"
            raise http_errors.invalid_request(reason, "model", "pinned")
        await self.residency.leave(model)

    async def sleep(self, model: ServedModel, level: int) -> None:
        """Let a loaded model sleep (`LLM.sleep`) when the requests that use it have ended.

        Raises:
            ApiError: it is not loaded, or of several processes.
        """
        _check_may_leave(model, "put to sleep")
        self._check_open(model)
        if not model.open:
            raise http_errors.model_not_loaded(model.name)
        await self.residency.leave(model, level)
        if model.error and model.state == "loaded":
            raise http_errors.invalid_request(model.error, "model")

    async def reload(self) -> None:
        """Look for models that have come or gone in the folder and the file.

        One that has gone, or has other settings, is unloaded when nobody uses it any more.

        Raises:
            ApiError: the folder or the file cannot be read; the models stay as they were.
        """
        try:
            sources = await self._in_worker(self.registry.sources)
        except USER_ERRORS as error:
            raise ApiError(500, str(error), code="models_unreadable") from error
        same = {model.name: model for model in self.models if model.source in sources}
        before = self.models
        self.residency.models = [
            same.get(source.name) or self._served(source) for source in sources
        ]
        for model in before:
            if same.get(model.name) is not model:
                self.residency.dismiss(model)
        new = [model for model in self.models if same.get(model.name) is not model]
        self.residency.run(self._examine(new))

    def _served(self, source: ModelSource) -> ServedModel:
        return ServedModel(source, keep=self._keep(source))

    def _keep(self, source: ModelSource) -> float | None:
        return self._settings.idle_unload if source.idle_unload is None else source.idle_unload

    def _check_open(self, model: ServedModel) -> None:
        if self.residency.closed:
            raise http_errors.shutting_down()
        if not self._started and model.state != "loaded":
            raise http_errors.model_loading()
        if reason := self.unavailable_reason():
            raise http_errors.process_unresponsive(reason)

    async def _examine(self, models: Sequence[ServedModel]) -> None:
        """Note of models that nobody has asked for yet how big they are, and what is wrong."""
        for model in models:
            error, model.file_bytes = await self._in_worker(partial(examine, model.source))
            if model.state == "unloaded":
                model.error = error

    async def _in_worker[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


def _most(models: Sequence[ServedModel], max_loaded: int | None, registry: ModelRegistry) -> int:
    """Number of models that may be in memory at a time."""
    at_start = sum(not model.source.on_demand for model in models)
    return max_loaded or (at_start if registry.is_fixed else max(at_start, _ON_DEMAND))


def _check_may_leave(model: ServedModel, what: str) -> None:
    if current_group() is not None:
        reason = f"{model.name} is computed by several processes, and cannot be {what}"
        raise http_errors.invalid_request(reason, "model", "not_supported")
