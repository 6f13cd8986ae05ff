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
from jinfer.engine.engine_stats import Stats
from jinfer.engine.thread_pools import start_threads
from jinfer.parallel.distributed.current_group import current_group
from jinfer.server.http import http_errors
from jinfer.server.http.http_errors import ApiError, RunsElsewhereError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.models.model_residency import ModelResidency, examine
from jinfer.server.models.served_model import ServedModel

_WORKERS = 4
_ON_DEMAND = 4  # models in memory at a time, with models on demand and without --max-loaded


class ModelManager:
    """All models of a server. Its methods are called on the event loop.

    Attributes:
        registry: sources of the models.
        residency: the models in memory.
        workers, compilers, waiters: thread pools for slow work, grammars, and waiting for engines.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        settings: ServerSettings,
        *,
        unloaded: Callable[[str, Stats], Any] = lambda name, last: None,
    ) -> None:
        """Create the manager; `start` loads models.

        Args:
            unloaded: called with the name and last statistics of a model that is unloaded.

        Raises:
            SourceError, SpecError: the folder or the file of models cannot be read.
        """
        self.registry, self._settings = registry, settings
        models = [self._served(source) for source in registry.sources()]
        max_models = _max_models(models, settings.max_loaded, registry)
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
        """Models of the command line, then of the file, then of the folder."""
        return self.residency.models

    @property
    def ready(self) -> bool:
        """Whether the models of the start are loaded."""
        return self._started

    @property
    def is_dynamic(self) -> bool:
        """Whether models are loaded on demand, or unloaded for others or when idle."""
        idle = self._settings.idle_unload is not None or self._settings.idle_sleep is not None
        few = self.residency.max_models < len(self.models)
        return not self.registry.is_fixed or few or idle or self._settings.is_worker

    def unavailable_reason(self) -> str:
        """Return why loaded models do not answer (a process of the job is silent); "": they do."""
        group = current_group()
        return "" if group is None else group.unavailable_reason()

    async def start(self) -> None:
        """Load as many models as fit in memory, other than models on demand.

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
        self._started = self.residency.started = True
        await self._examine([model for model in self.models if model.source.on_demand])

    def refuse_requests(self) -> None:
        """Refuse new requests; running requests continue."""
        self.residency.closed = True
        if (group := current_group()) is not None:
            group.is_leaving = True

    async def close(self) -> None:
        """Unload every model."""
        await self.residency.close()
        for pool in (self.workers, self.waiters, self.compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, Stats]:
        """Return the statistics of each loaded model, awake or asleep."""
        return {model.name: stats for model in self.models if (stats := model.stats) is not None}

    def mark_ended(self) -> None:
        """Mark models as unloaded whose processes have ended."""
        for model in self.models:
            self.residency.mark_ended(model)

    async def refresh(self) -> None:
        """Fetch statistics and adapters from the models' own processes."""
        for model in self.models:
            if model.open and model.worker is not None:
                await self._in_worker(model.worker.stats)

    def by_name(self, name: str | None) -> ServedModel:
        """Return the model with a name; None: the first. Raises `ApiError` without such a model."""
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
        """Return the first model of the command line, or else the last used model."""
        if self.registry.named:
            return self.models[0]
        return max(self.models, key=lambda model: (model.open, model.open and model.last_used))

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return sum(model.waiters for model in self.models)

    def find(self, name: str | None) -> ServedModel:
        """Return the known model of a request. Raises `ApiError`."""
        return self.models[0] if self._any_name else self.by_name(name)

    async def look_for(self, name: str | None) -> ServedModel:
        """Return the model of a request; look for an unknown model in the folder.

        Raises:
            ApiError: there is no such model.
        """
        try:
            return self.find(name)
        except ApiError:
            if self.registry.is_fixed and not self._settings.runtime_adapters:
                raise
        if self._settings.runtime_adapters:
            await self.refresh()  # perhaps the name of a new adapter
        if not self.registry.is_fixed:
            await self.reload()
        return self.by_name(name)

    def answers_to(self, name: str) -> bool:
        """Return whether the only model answers requests for another name."""
        if not self._any_name:
            return False
        model = self.models[0]
        return name not in (*model.names, *model.adapters)

    @contextlib.asynccontextmanager
    async def use(
        self, name: str | None, *, keep: float | None = None
    ) -> AsyncIterator[ServedModel]:
        """Provide the model of a request, loaded if needed and kept in memory meanwhile.

        Args:
            keep: seconds that it stays in memory afterwards; None: its setting.

        Raises:
            ApiError: the name is unknown, the model is still loading or could not be loaded, there
                is no room for it, the server is shutting down, or a process of the job does not
                respond.
            RunsElsewhereError: another process has to answer.
        """
        model = await self.look_for(name)
        self._check_open(model)
        if not self._settings.autoload and model.state == "unloaded":
            raise http_errors.model_not_loaded(model.name)
        async with self.keep_loaded(model):
            model.keep = self._keep(model.source) if keep is None else keep
            if model.worker is not None:
                raise RunsElsewhereError(model)
            yield model

    @contextlib.asynccontextmanager
    async def keep_loaded(
        self, model: ServedModel, *, awake: bool = True
    ) -> AsyncIterator[ServedModel]:
        """Load or wake a model if needed, and keep it in memory. Raises `ApiError`.

        Args:
            awake: whether to wake a sleeping model.
        """
        self.residency.mark_ended(model)
        if awake or model.state != "sleeping":
            await self.residency.ensure_loaded(model)
        model.users += 1
        model.cancel_timers()
        model.last_used = time.monotonic()
        try:
            yield model
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            self.residency.schedule_idle(model)

    @contextlib.asynccontextmanager
    async def peek(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Provide the model of a request that computes nothing; a sleeping model is not woken.

        Raises:
            ApiError: see `use`.
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
        """Load or wake a model if needed. Raises `ApiError`."""
        model = await self.look_for(name)
        self._check_open(model)
        await self.residency.ensure_loaded(model)
        return model

    async def unload(self, model: ServedModel) -> None:
        """Unload a model when the requests that use it have ended.

        Raises:
            ApiError: the model is pinned, or runs in several processes.
        """
        _check_may_leave(model, "unloaded")
        if model.source.pinned:
            reason = f"{model.name} is pinned, so that it stays in memory"
            raise http_errors.invalid_request(reason, "model", "pinned")
        await self.residency.unload(model)

    async def sleep(self, model: ServedModel, level: int) -> None:
        """Let a loaded model sleep (`LLM.sleep`) when the requests that use it have ended.

        Raises:
            ApiError: the model is not loaded, or runs in several processes.
        """
        _check_may_leave(model, "put to sleep")
        self._check_open(model)
        if not model.open:
            raise http_errors.model_not_loaded(model.name)
        await self.residency.unload(model, level)
        if model.error and model.state == "loaded":
            raise http_errors.invalid_request(model.error, "model")

    async def reload(self) -> None:
        """Look for new and removed models in the folder and the file.

        A removed or changed model is unloaded once no request uses it.

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
                self.residency.remove(model)
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
        """Record the sizes and errors of models that were not loaded yet."""
        for model in models:
            error, model.file_bytes = await self._in_worker(partial(examine, model.source))
            if model.state == "unloaded":
                model.error = error

    async def _in_worker[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


def _max_models(
    models: Sequence[ServedModel], max_loaded: int | None, registry: ModelRegistry
) -> int:
    """Return the maximum number of models in memory."""
    at_start = sum(not model.source.on_demand for model in models)
    return max_loaded or (at_start if registry.is_fixed else max(at_start, _ON_DEMAND))


def _check_may_leave(model: ServedModel, what: str) -> None:
    if current_group() is not None:
        reason = f"{model.name} runs in several processes and cannot be {what}"
        raise http_errors.invalid_request(reason, "model", "not_supported")
