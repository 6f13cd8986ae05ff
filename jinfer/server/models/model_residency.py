"""Model residency: which models are in memory, which leave for others, and who waits for which."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.engine_stats import Stats
from jinfer.engine.scheduling.cache_size import trim
from jinfer.runtime.thread_priority import lower_priority
from jinfer.server.http import http_errors
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_loading import Opened, open_beside, open_llm, warm_up_constraints
from jinfer.server.models.served_model import ServedModel

_log = logging.getLogger("jinfer.server")
_LEAVING = 0.1  # seconds between two looks whether one that leaves has left
_DOZES = 2  # the level of those that sleep because nobody asks them anything


class ModelResidency:
    """Loads models that are waited for, and takes away those that are not.

    In the order in which models were asked for, each gets a place (of `most`) as soon as one is
    free; until then the least recently used model without requests gives its own. A model in use,
    or pinned, never leaves. Who waits longer than `model_wait` for a place is refused.

    Its methods are called on the event loop, which alone changes it; loading is done in threads.

    Attributes:
        models: the models of the server.
        max_models: number of models in memory at a time.
        beside_others: whether models are loaded while others answer.
        closed: whether nothing is loaded any more.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        max_models: int,
        settings: ServerSettings,
        unloaded: Callable[[str, Stats], Any],
    ) -> None:
        self.models, self.max_models = list(models), max_models
        self.beside_others = self.closed = False
        self._settings, self._unloaded = settings, unloaded
        self._queue: list[ServedModel] = []
        self._watching: dict[ServedModel, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # What a process of its own loads, others' streams go on beside.
        lower = lower_priority if settings.is_worker else None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=lower)
        self._warmer = ThreadPoolExecutor(1, thread_name_prefix="warmer", initializer=lower)
        self._unloader = ThreadPoolExecutor(1, thread_name_prefix="unloader")

    async def arrive(self, model: ServedModel) -> None:
        """Wait until a model is loaded and nobody wants it to leave; loads it if needed.

        Raises:
            ApiError: it could not be loaded, or there is no room for it.
        """
        while model.state != "loaded" or model.leaving:
            if model.arrival is None:
                model.arrival = asyncio.get_running_loop().create_future()
            arrival = model.arrival
            model.waiters += 1
            try:
                self._want(model)
                if (error := await asyncio.shield(arrival)) is not None:
                    raise http_errors.repeated(error)
            finally:
                model.waiters -= 1
                if not model.waiters and model in self._queue:  # nobody waits for it any more
                    self._queue.remove(model)
                    self.rest(model)

    async def leave(self, model: ServedModel, level: int = 0) -> None:
        """Unload a model, or lets it sleep, once the requests that use it have ended.

        Requests that come meanwhile wait until it has left, and have it loaded again. Whoever stops
        waiting here takes the wish back.

        Args:
            level: 0: unload; 1 and 2: as of `LLM.sleep`.
        """
        model.leaving += 1
        departures = model.departures
        try:
            while model.departures == departures and not model.has_left(level):
                if model.open and not model.users:
                    self._begin_to_leave(model, level)
                await self._change(model)
        finally:
            model.leaving -= 1
            self.rest(model)

    async def load(self, model: ServedModel) -> None:
        """Load a model in a thread, or wakes it; `one.error` says why that failed."""
        model.state, begun, error = "loading", time.perf_counter(), ""
        self._share_cores()
        try:
            if model.llm_or_none is None:
                opened = await _in(self._loader, self._open, model.source)
                model.llm_or_none, model.details = opened
            else:
                await _in(self._loader, model.llm_or_none.wake_up)
        except USER_ERRORS as failure:
            error = " ".join(str(failure).split())
            _log.error("%s: %s", model.name, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("%s could not be loaded", model.name)
        if error and model.llm_or_none is not None:  # it slept, and cannot be woken
            llm, model.llm_or_none = model.llm_or_none, None
            await _in(self._unloader, llm.close)
        model.state, model.error = ("unloaded" if error else "loaded"), error
        model.sleep_level, model.last_used = 0, time.monotonic()
        if not error:
            seconds = round(time.perf_counter() - begun, 3)
            _log.info("model loaded", extra={"model": model.name, "seconds": seconds})
            if self._settings.warm_up and model.worker is None:
                self.run(_in(self._warmer, warm_up_constraints, model.llm))
        _answer(model, http_errors.load_failed(model.name, error) if error else None)
        self.rest(model)

    def _open(self, source: ModelSource) -> Opened:
        if self.beside_others:
            return open_beside(source, self._settings)
        return open_llm(source, self._settings.warm_up)

    def _share_cores(self) -> None:
        """Tell the models of this process whether others come or go, or compute beside them."""
        busy = any(
            model.worker is not None or model.state in ("loading", "unloading")
            for model in self.models
        )
        for model in self.models:
            if isinstance(model.llm_or_none, LLM):
                model.session.engine.contended = busy or self._settings.is_worker

    def forget(self, model: ServedModel) -> None:
        """Note that a model's process has ended by itself; the next request loads it again."""
        if model.worker is not None and model.worker.has_ended and model.open:
            self.run(_in(self._unloader, model.worker.close))
            _log.error("%s: its process has ended", model.name)
            model.state, model.llm_or_none, model.error = "unloaded", None, "its process has ended"
            self.rest(model)

    def dismiss(self, model: ServedModel) -> None:
        """Unload a model that is not offered any more, once nobody uses it."""
        model.gone = True
        if model in self._queue:
            self._queue.remove(model)
        self._want(model)
        self.run(self.leave(model))

    def rest(self, model: ServedModel) -> None:
        """Say what is to happen to a model unless somebody uses it meanwhile."""
        self._share_cores()
        for future in self._watching.pop(model, ()):
            if not future.done():
                future.set_result(None)
        if model.state == "loaded" and not model.leaving:
            _answer(model, None)  # those who waited for it to leave, and it stayed
        if model.open and not model.users and not model.source.pinned and model not in self._queue:
            model.cancel_timers()
            loop, rested = asyncio.get_running_loop(), time.monotonic() - model.last_used
            for after, level in ((model.keep, 0), (self._settings.idle_sleep, _DOZES)):
                if after is not None and after < math.inf and not model.has_left(level):
                    due = loop.call_later(max(0.0, after - rested), self._due, model, level)
                    model.timers.append(due)
        self._advance()

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
                await _in(self._unloader, model.loaded.close)
        for pool in (self._loader, self._unloader, self._warmer):
            pool.shutdown(wait=False, cancel_futures=True)

    def _want(self, model: ServedModel) -> None:
        """Queue a model that is waited for, and is neither in memory nor on its way there."""
        if model.gone:
            _answer(
                model, http_errors.unknown_model(model.name, [each.name for each in self.models])
            )
        elif model.waiters and model.state in ("unloaded", "sleeping") and model not in self._queue:
            model.cancel_timers()
            self._queue.append(model)
            self._give_up_later(model, self._settings.model_wait)
        self._advance()

    def _give_up_later(self, model: ServedModel, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up, model)
        model.timers.append(timer)

    def _give_up(self, model: ServedModel) -> None:
        """Tell those who wait for a model that there was no room for it."""
        if model in self._queue and any(each.state == "unloading" for each in self.models):
            self._give_up_later(model, _LEAVING)
        elif model in self._queue:
            self._queue.remove(model)
            _answer(
                model, http_errors.no_room(model.name, self.max_models, self._settings.retry_after)
            )
            self.rest(model)

    def _advance(self) -> None:
        """Load what is next in the queue, or makes room for it."""
        while self._queue and not self.closed:
            model = self._queue[0]
            others = [each for each in self.models if each.occupies and each is not model]
            if len(others) < self.max_models:
                self._queue.pop(0)
                model.cancel_timers()
                model.state = "loading"
                self.run(self.load(model))
                continue
            idle = [each for each in others if each.may_leave]
            if idle and not any(each.state == "unloading" for each in others):
                self._begin_to_leave(min(idle, key=lambda each: each.last_used), 0)
            return

    def _due(self, model: ServedModel, level: int) -> None:
        if model.open and not model.users and not model.waiters and not model.has_left(level):
            self._begin_to_leave(model, level)

    def _begin_to_leave(self, model: ServedModel, level: int) -> None:
        model.cancel_timers()
        model.state = "unloading"
        self.run(self._take_away(model, level))

    async def _take_away(self, model: ServedModel, level: int) -> None:
        llm, why = model.loaded, ""
        try:
            if not level:
                self._unloaded(model.name, await _in(self._unloader, llm.stats))
                model.llm_or_none = None
            await _in(self._unloader, *((llm.sleep, level) if level else (llm.close,)))
        except USER_ERRORS as error:
            why = " ".join(str(error).split())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            _log.exception("%s could not be unloaded", model.name)
        if not level:
            del llm
            await _in(self._unloader, trim)  # the tokenizer is freed only now
        model.error = why
        if why and level:
            model.state = "loaded"
            _log.error("%s does not sleep: %s", model.name, why)
        else:
            model.state, model.sleep_level = ("sleeping" if level else "unloaded"), level
            _log.info("model sleeps" if level else "model unloaded", extra={"model": model.name})
        model.departures += 1
        self._want(model)
        self.rest(model)

    async def _change(self, model: ServedModel) -> None:
        """Wait until `rest` is called."""
        future = asyncio.get_running_loop().create_future()
        self._watching.setdefault(model, []).append(future)
        await future


def _answer(model: ServedModel, error: ApiError | None) -> None:
    """Let those who wait for a model go on, or tells them why it does not come."""
    arrival, model.arrival = model.arrival, None
    if arrival is not None and not arrival.done():
        arrival.set_result(error)


async def _in[T](pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
