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
from jinfer.server import http_errors
from jinfer.server.http_errors import ApiError
from jinfer.server.model_loading import Opened, open_beside, open_llm, warm_up_constraints
from jinfer.server.served_model import ServedModel
from jinfer.server.server_settings import ModelSource, ServerSettings
from jinfer.startup.thread_priority import lower_priority

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
        most: number of models in memory at a time.
        beside_others: whether models are loaded while others answer.
        closed: whether nothing is loaded any more.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        most: int,
        settings: ServerSettings,
        unloaded: Callable[[str, Stats], Any],
    ) -> None:
        self.models, self.most = list(models), most
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

    async def arrive(self, one: ServedModel) -> None:
        """Waits until a model is loaded and nobody wants it to leave; loads it if needed.

        Raises:
            ApiError: it could not be loaded, or there is no room for it.
        """
        while one.state != "loaded" or one.leaving:
            if one.arrival is None:
                one.arrival = asyncio.get_running_loop().create_future()
            arrival = one.arrival
            one.waiters += 1
            try:
                self._want(one)
                if (error := await asyncio.shield(arrival)) is not None:
                    raise http_errors.repeated(error)
            finally:
                one.waiters -= 1
                if not one.waiters and one in self._queue:  # nobody waits for it any more
                    self._queue.remove(one)
                    self.rest(one)

    async def leave(self, one: ServedModel, level: int = 0) -> None:
        """Unloads a model, or lets it sleep, once the requests that use it have ended.

        Requests that come meanwhile wait until it has left, and have it loaded again. Whoever stops
        waiting here takes the wish back.

        Args:
            level: 0: unload; 1 and 2: as of `LLM.sleep`.
        """
        one.leaving += 1
        departures = one.departures
        try:
            while one.departures == departures and not one.has_left(level):
                if one.open and not one.users:
                    self._begin_to_leave(one, level)
                await self._change(one)
        finally:
            one.leaving -= 1
            self.rest(one)

    async def load(self, one: ServedModel) -> None:
        """Loads a model in a thread, or wakes it; `one.error` says why that failed."""
        one.state, begun, error = "loading", time.perf_counter(), ""
        self._share_cores()
        try:
            if one.llm_or_none is None:
                opened = await _in(self._loader, self._open, one.source)
                one.llm_or_none, one.details = opened
            else:
                await _in(self._loader, one.llm_or_none.wake_up)
        except USER_ERRORS as failure:
            error = " ".join(str(failure).split())
            _log.error("%s: %s", one.name, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("%s could not be loaded", one.name)
        if error and one.llm_or_none is not None:  # it slept, and cannot be woken
            llm, one.llm_or_none = one.llm_or_none, None
            await _in(self._unloader, llm.close)
        one.state, one.error = ("unloaded" if error else "loaded"), error
        one.sleep_level, one.last_used = 0, time.monotonic()
        if not error:
            seconds = round(time.perf_counter() - begun, 3)
            _log.info("model loaded", extra={"model": one.name, "seconds": seconds})
            if self._settings.warm_up and one.worker is None:
                self.run(_in(self._warmer, warm_up_constraints, one.llm))
        _answer(one, http_errors.load_failed(one.name, error) if error else None)
        self.rest(one)

    def _open(self, source: ModelSource) -> Opened:
        if self.beside_others:
            return open_beside(source, self._settings)
        return open_llm(source, self._settings.warm_up)

    def _share_cores(self) -> None:
        """Tells the models of this process whether others come or go, or compute beside them."""
        busy = any(
            one.worker is not None or one.state in ("loading", "unloading") for one in self.models
        )
        for one in self.models:
            if isinstance(one.llm_or_none, LLM):
                one.session.engine.contended = busy or self._settings.is_worker

    def forget(self, one: ServedModel) -> None:
        """Notes that a model's process has ended by itself; the next request loads it again."""
        if one.worker is not None and one.worker.has_ended and one.open:
            self.run(_in(self._unloader, one.worker.close))
            _log.error("%s: its process has ended", one.name)
            one.state, one.llm_or_none, one.error = "unloaded", None, "its process has ended"
            self.rest(one)

    def dismiss(self, one: ServedModel) -> None:
        """Unloads a model that is not offered any more, once nobody uses it."""
        one.gone = True
        if one in self._queue:
            self._queue.remove(one)
        self._want(one)
        self.run(self.leave(one))

    def rest(self, one: ServedModel) -> None:
        """Says what is to happen to a model unless somebody uses it meanwhile."""
        self._share_cores()
        for future in self._watching.pop(one, ()):
            if not future.done():
                future.set_result(None)
        if one.state == "loaded" and not one.leaving:
            _answer(one, None)  # those who waited for it to leave, and it stayed
        if one.open and not one.users and not one.source.pinned and one not in self._queue:
            one.cancel_timers()
            loop, rested = asyncio.get_running_loop(), time.monotonic() - one.last_used
            for after, level in ((one.keep, 0), (self._settings.idle_sleep, _DOZES)):
                if after is not None and after < math.inf and not one.has_left(level):
                    due = loop.call_later(max(0.0, after - rested), self._due, one, level)
                    one.timers.append(due)
        self._advance()

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Unloads every model."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        for one in self.models:
            one.cancel_timers()
            if one.open:
                await _in(self._unloader, one.loaded.close)
        for pool in (self._loader, self._unloader, self._warmer):
            pool.shutdown(wait=False, cancel_futures=True)

    def _want(self, one: ServedModel) -> None:
        """Queues a model that is waited for, and is neither in memory nor on its way there."""
        if one.gone:
            _answer(one, http_errors.unknown_model(one.name, [each.name for each in self.models]))
        elif one.waiters and one.state in ("unloaded", "sleeping") and one not in self._queue:
            one.cancel_timers()
            self._queue.append(one)
            self._give_up_later(one, self._settings.model_wait)
        self._advance()

    def _give_up_later(self, one: ServedModel, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up, one)
        one.timers.append(timer)

    def _give_up(self, one: ServedModel) -> None:
        """Tells those who wait for a model that there was no room for it."""
        if one in self._queue and any(each.state == "unloading" for each in self.models):
            self._give_up_later(one, _LEAVING)
        elif one in self._queue:
            self._queue.remove(one)
            _answer(one, http_errors.no_room(one.name, self.most, self._settings.retry_after))
            self.rest(one)

    def _advance(self) -> None:
        """Loads what is next in the queue, or makes room for it."""
        while self._queue and not self.closed:
            one = self._queue[0]
            others = [each for each in self.models if each.occupies and each is not one]
            if len(others) < self.most:
                self._queue.pop(0)
                one.cancel_timers()
                one.state = "loading"
                self.run(self.load(one))
                continue
            idle = [each for each in others if each.may_leave]
            if idle and not any(each.state == "unloading" for each in others):
                self._begin_to_leave(min(idle, key=lambda each: each.last_used), 0)
            return

    def _due(self, one: ServedModel, level: int) -> None:
        if one.open and not one.users and not one.waiters and not one.has_left(level):
            self._begin_to_leave(one, level)

    def _begin_to_leave(self, one: ServedModel, level: int) -> None:
        one.cancel_timers()
        one.state = "unloading"
        self.run(self._take_away(one, level))

    async def _take_away(self, one: ServedModel, level: int) -> None:
        llm, why = one.loaded, ""
        try:
            if not level:
                self._unloaded(one.name, await _in(self._unloader, llm.stats))
                one.llm_or_none = None
            await _in(self._unloader, *((llm.sleep, level) if level else (llm.close,)))
        except USER_ERRORS as error:
            why = " ".join(str(error).split())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            _log.exception("%s could not be unloaded", one.name)
        if not level:
            del llm
            await _in(self._unloader, trim)  # the tokenizer is freed only now
        one.error = why
        if why and level:
            one.state = "loaded"
            _log.error("%s does not sleep: %s", one.name, why)
        else:
            one.state, one.sleep_level = ("sleeping" if level else "unloaded"), level
            _log.info("model sleeps" if level else "model unloaded", extra={"model": one.name})
        one.departures += 1
        self._want(one)
        self.rest(one)

    async def _change(self, one: ServedModel) -> None:
        """Waits until `rest` is called."""
        future = asyncio.get_running_loop().create_future()
        self._watching.setdefault(one, []).append(future)
        await future


def _answer(one: ServedModel, error: ApiError | None) -> None:
    """Lets those who wait for a model go on, or tells them why it does not come."""
    arrival, one.arrival = one.arrival, None
    if arrival is not None and not arrival.done():
        arrival.set_result(error)


async def _in[T](pool: ThreadPoolExecutor, work: Callable[..., T], *given: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *given)
