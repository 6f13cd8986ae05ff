"""Model residency: loads requested models, and unloads idle models to make room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinfer.api.build_engine import all_shapes
from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.engine_stats import Stats
from jinfer.engine.scheduling.cache_size import trim
from jinfer.loader.open_keywords import override_tables
from jinfer.loader.open_model import open_files
from jinfer.ops.backend import start
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.http import http_errors
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_details import ModelDetails, details_of
from jinfer.server.models.model_worker import ModelWorker
from jinfer.server.models.served_model import ServedModel
from jinfer.startup import lower_priority

_log = logging.getLogger("jinfer.server")
type Opened = tuple[LLM | ModelWorker, ModelDetails]
_WARM_UP_TOKENS = 33  # tokens of the warm-up prompt


def open_llm(source: ModelSource, warm_up: bool) -> Opened:
    """Open and load a model.

    Args:
        warm_up: whether to compile all programs in the background of the first requests.
    """
    # The warm-up's programs are compiled while the weights are read.
    llm = LLM(source.path, first=lambda llm: [0] * _WARM_UP_TOKENS, **source.overrides)
    if llm.spec.engine.warm_up:
        warm_up_constraints(llm)
    elif warm_up:
        engine = llm.session.engine
        engine.runner.programs.announce(all_shapes(engine))
    return llm, details_of(llm)


def has_own_processes(settings: ServerSettings) -> bool:
    """Return whether models that are loaded later have their own processes."""
    start()
    import jax

    return settings.model_processes and jax.default_backend() == "cpu"


def open_beside(source: ModelSource, settings: ServerSettings) -> Opened:
    """Load a model in its own process, so that the streams of other models continue.

    On a GPU the model is loaded here, because two processes would contend for its memory.
    """
    if not has_own_processes(settings):
        return open_llm(source, settings.warm_up)
    worker = ModelWorker(source, settings)
    return worker, worker.details


def warm_up_constraints(llm: LLM) -> None:
    """Build the vocabulary tables of structured outputs before the first constraint needs them."""
    # Imported here, because it is not needed at startup.
    from jinfer.sampling.structured import compile_constraint, forget_constraints

    if llm.tokenizer is not None and llm.spec.generates:
        with contextlib.suppress(ConstraintError):
            compile_constraint(llm.tokenizer, json_schema=True)
        if llm.session.closed:  # meanwhile
            forget_constraints(llm.tokenizer)


def examine(source: ModelSource) -> tuple[str, int]:
    """Return why a model's files cannot be opened ("": they can), and the bytes of the weights."""
    try:
        checkpoint = open_files(source.path, override_tables(source.overrides)).checkpoint
    except USER_ERRORS as error:
        return " ".join(str(error).split()), 0
    except Exception as error:
        _log.exception("%s could not be opened", source.name)
        return f"{type(error).__name__}: {error}", 0
    return "", sum(tensor.nbytes for tensor in checkpoint.tensors.values())


_LEAVING = 0.1  # seconds between two checks whether a model is unloaded
_DOZES = 2  # sleep level of idle models


class ModelResidency:
    """Loads the models that requests wait for, and unloads others.

    At most `max_models` models are in memory. Requested models are loaded in order, when there is
    room; the least recently used idle model makes room. A model in use, or pinned, is never
    unloaded. A request that waits longer than `model_wait` is refused.

    Only the event loop calls its methods; threads load the models.

    Attributes:
        models: the models of the server.
        max_models: number of models in memory at a time.
        started: whether other models may be answering during a load.
        closed: whether loading has ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        max_models: int,
        settings: ServerSettings,
        unloaded: Callable[[str, Stats], Any],
    ) -> None:
        self.models, self.max_models = list(models), max_models
        self.started = self.closed = False
        self._settings, self._on_unloaded = settings, unloaded
        self._queue: list[ServedModel] = []
        self._watching: dict[ServedModel, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # A model process has a low priority, so that the streams of other models continue.
        lower = lower_priority if settings.is_worker else None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=lower)
        self._warmer = ThreadPoolExecutor(1, thread_name_prefix="warmer", initializer=lower)
        self._unloader = ThreadPoolExecutor(1, thread_name_prefix="unloader")

    async def ensure_loaded(self, model: ServedModel) -> None:
        """Wait until a model is loaded and stays; load it if needed.

        Raises:
            ApiError: the model could not be loaded, or there is no room.
        """
        while model.state != "loaded" or model.unload_waiters:
            if model.load_result is None:
                model.load_result = asyncio.get_running_loop().create_future()
            load_result = model.load_result
            model.waiters += 1
            try:
                self._enqueue(model)
                if (error := await asyncio.shield(load_result)) is not None:
                    raise http_errors.repeated(error)
            finally:
                model.waiters -= 1
                if not model.waiters and model in self._queue:  # no request waits any more
                    self._queue.remove(model)
                    self.schedule_idle(model)

    async def unload(self, model: ServedModel, level: int = 0) -> None:
        """Unload a model, or let it sleep, once the requests that use it have ended.

        New requests wait until it is unloaded, and load it again. Cancelling this call keeps the
        model.

        Args:
            level: 0: unload; 1 and 2: levels of `LLM.sleep`.
        """
        model.unload_waiters += 1
        unload_count = model.unload_count
        try:
            while model.unload_count == unload_count and not model.is_unloaded(level):
                if model.open and not model.users:
                    self._begin_unload(model, level)
                await self._wait_for_change(model)
        finally:
            model.unload_waiters -= 1
            self.schedule_idle(model)

    async def load(self, model: ServedModel) -> None:
        """Load or wake a model in a thread; `model.error` is the reason of a failure."""
        model.state, begun, error = "loading", time.perf_counter(), ""
        self._update_contention()
        try:
            if model.llm_or_none is None:
                opened = await _in_pool(self._loader, self._open, model.source)
                model.llm_or_none, model.details = opened
            else:
                await _in_pool(self._loader, model.llm_or_none.wake_up)
        except USER_ERRORS as failure:
            error = " ".join(str(failure).split())
            _log.error("%s: %s", model.name, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("%s could not be loaded", model.name)
        if error and model.llm_or_none is not None:  # a sleeping model that cannot be woken
            llm, model.llm_or_none = model.llm_or_none, None
            await _in_pool(self._unloader, llm.close)
        model.state, model.error = ("unloaded" if error else "loaded"), error
        model.sleep_level, model.last_used = 0, time.monotonic()
        if not error:
            seconds = round(time.perf_counter() - begun, 3)
            _log.info("model loaded", extra={"model": model.name, "seconds": seconds})
            if self._settings.warm_up and model.worker is None:
                self.run(_in_pool(self._warmer, warm_up_constraints, model.llm))
        _notify(model, http_errors.load_failed(model.name, error) if error else None)
        self.schedule_idle(model)

    def _open(self, source: ModelSource) -> Opened:
        if self.started:
            return open_beside(source, self._settings)
        return open_llm(source, self._settings.warm_up)

    def _update_contention(self) -> None:
        """Tell the engines of this process whether other models load, unload or compute."""
        busy = any(
            model.worker is not None or model.state in ("loading", "unloading")
            for model in self.models
        )
        for model in self.models:
            if isinstance(model.llm_or_none, LLM):
                model.session.engine.contended = busy or self._settings.is_worker

    def mark_ended(self, model: ServedModel) -> None:
        """Mark a model as unloaded if its process has ended; the next request loads it again."""
        if model.worker is not None and model.worker.has_ended and model.open:
            self.run(_in_pool(self._unloader, model.worker.close))
            _log.error("%s: its process has ended", model.name)
            model.state, model.llm_or_none, model.error = "unloaded", None, "its process has ended"
            self.schedule_idle(model)

    def remove(self, model: ServedModel) -> None:
        """Unload a removed model once no request uses it."""
        model.removed = True
        if model in self._queue:
            self._queue.remove(model)
        self._enqueue(model)
        self.run(self.unload(model))

    def schedule_idle(self, model: ServedModel) -> None:
        """Schedule the idle timers of a model."""
        self._update_contention()
        for future in self._watching.pop(model, ()):
            if not future.done():
                future.set_result(None)
        if model.state == "loaded" and not model.unload_waiters:
            _notify(model, None)  # wake requests that waited for the unloading, which was cancelled
        if model.open and not model.users and not model.source.pinned and model not in self._queue:
            model.cancel_timers()
            loop, rested = asyncio.get_running_loop(), time.monotonic() - model.last_used
            for after, level in ((model.keep, 0), (self._settings.idle_sleep, _DOZES)):
                if after is not None and after < math.inf and not model.is_unloaded(level):
                    due = loop.call_later(max(0.0, after - rested), self._on_idle, model, level)
                    model.timers.append(due)
        self._load_next()

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Unload every model."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        for model in self.models:
            model.cancel_timers()
            if model.open:
                await _in_pool(self._unloader, model.loaded.close)
        for pool in (self._loader, self._unloader, self._warmer):
            pool.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, model: ServedModel) -> None:
        """Queue a model that requests wait for, unless it is loaded or loading."""
        if model.removed:
            _notify(
                model, http_errors.unknown_model(model.name, [model.name for model in self.models])
            )
        elif model.waiters and model.state in ("unloaded", "sleeping") and model not in self._queue:
            model.cancel_timers()
            self._queue.append(model)
            self._refuse_later(model, self._settings.model_wait)
        self._load_next()

    def _refuse_later(self, model: ServedModel, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._refuse, model)
        model.timers.append(timer)

    def _refuse(self, model: ServedModel) -> None:
        """Refuse the requests that wait for a model, as there is no room."""
        if model in self._queue and any(model.state == "unloading" for model in self.models):
            self._refuse_later(model, _LEAVING)
        elif model in self._queue:
            self._queue.remove(model)
            _notify(
                model, http_errors.no_room(model.name, self.max_models, self._settings.retry_after)
            )
            self.schedule_idle(model)

    def _load_next(self) -> None:
        """Load the next model of the queue, or make room for it."""
        while self._queue and not self.closed:
            model = self._queue[0]
            others = [item for item in self.models if item.in_memory and item is not model]
            if len(others) < self.max_models:
                self._queue.pop(0)
                model.cancel_timers()
                model.state = "loading"
                self.run(self.load(model))
                continue
            idle = [other for other in others if other.can_unload]
            if idle and not any(other.state == "unloading" for other in others):
                self._begin_unload(min(idle, key=lambda item: item.last_used), 0)
            return

    def _on_idle(self, model: ServedModel, level: int) -> None:
        if model.open and not model.users and not model.waiters and not model.is_unloaded(level):
            self._begin_unload(model, level)

    def _begin_unload(self, model: ServedModel, level: int) -> None:
        model.cancel_timers()
        model.state = "unloading"
        self.run(self._unload(model, level))

    async def _unload(self, model: ServedModel, level: int) -> None:
        llm, why = model.loaded, ""
        try:
            if not level:
                self._on_unloaded(model.name, await _in_pool(self._unloader, llm.stats))
                model.llm_or_none = None
            await _in_pool(self._unloader, *((llm.sleep, level) if level else (llm.close,)))
        except USER_ERRORS as error:
            why = " ".join(str(error).split())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            _log.exception("%s could not be unloaded", model.name)
        if not level:
            del llm
            await _in_pool(self._unloader, trim)  # frees the tokenizer
        model.error = why
        if why and level:
            model.state = "loaded"
            _log.error("%s does not sleep: %s", model.name, why)
        else:
            model.state, model.sleep_level = ("sleeping" if level else "unloaded"), level
            _log.info("model sleeps" if level else "model unloaded", extra={"model": model.name})
        model.unload_count += 1
        self._enqueue(model)
        self.schedule_idle(model)

    async def _wait_for_change(self, model: ServedModel) -> None:
        """Wait until `schedule_idle` is called."""
        future = asyncio.get_running_loop().create_future()
        self._watching.setdefault(model, []).append(future)
        await future


def _notify(model: ServedModel, error: ApiError | None) -> None:
    """Wake the requests that wait for a model, with an error if it was not loaded."""
    load_result, model.load_result = model.load_result, None
    if load_result is not None and not load_result.done():
        load_result.set_result(error)


async def _in_pool[T](pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
