"""Model manager: loads models on demand and unloads the least recently used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from jinfer.api.build_engine import all_shapes
from jinfer.api.llm import LLM
from jinfer.api.session import Session
from jinfer.api.user_errors import USER_ERRORS
from jinfer.distributed.process_group import current_group
from jinfer.engine.engine_stats import Stats
from jinfer.engine.thread_pools import start_threads
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server import http_errors
from jinfer.server.server_settings import ModelSource
from jinfer.weights.model_size import sizes_of

_log = logging.getLogger("jinfer.server")
_WARM_UP_TOKENS = 33  # tokens of the warm-up prompt
_WORKERS = 4
LoadState = Literal["absent", "loading", "ready", "failed"]


@dataclass(eq=False)
class ServedModel:
    """A model that the server offers.

    Attributes:
        source: its name and path.
        state: whether it is loaded.
        users: number of requests that are using it.
        last_used: when a request last used it.
        error: why it could not be loaded.
        parameters: number of parameters.
        created: when the server began to offer it.
    """

    source: ModelSource
    state: LoadState = "absent"
    users: int = 0
    last_used: float = 0.0
    error: str = ""
    parameters: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    _llm: LLM | None = None

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.source.name

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it: its path too, and names with Ollama's default tag."""
        own = (self.name, *self.source.aliases)
        return (*own, self.source.path, *(f"{name}:latest" for name in own))

    @property
    def llm(self) -> LLM:
        """The loaded model."""
        assert self._llm is not None, f"{self.name} is not loaded"
        return self._llm

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that are loaded beside it, which are names of models too."""
        return [*self.session.adapters.loaded] if self.state == "ready" else []

    @property
    def session(self) -> Session:
        """The engine session of the loaded model."""
        return self.llm.session


class ModelManager:
    """All models of a server.

    Attributes:
        models: the models in the order of the command line; requests without a name use the first.
        waiting: number of requests that wait for a model to be loaded.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        *,
        max_loaded: int | None = None,
        strict: bool = False,
        warm_up: bool = True,
        unloaded: Callable[[str, Stats], Any] = lambda name, last: None,
    ) -> None:
        """Loads nothing yet.

        Args:
            max_loaded: number of models in memory at a time; None: all.
            strict: a single model does not answer for other names.
            warm_up: compile all programs in the background after loading.
            unloaded: called with the name and last statistics of a model that is unloaded.
        """
        self.models = [ServedModel(source) for source in sources]
        self._most = min(max_loaded or len(self.models), len(self.models))
        self._any_name = not strict and len(self.models) == 1
        self._warm_up = warm_up
        self._unloaded = unloaded
        self._started = self._closing = False
        self.waiting = 0
        self._changed = asyncio.Condition()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        # Slow work, such as tokenizing a long text, must not block the event loop.
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="worker")
        # Compiling a grammar can take seconds; a pool of its own delays only other grammars.
        self.compilers = ThreadPoolExecutor(2, thread_name_prefix="compiler")
        # Threads that wait for an engine must not occupy the workers of other requests.
        self.waiters = ThreadPoolExecutor(64, thread_name_prefix="waiter")

    @property
    def ready(self) -> bool:
        """Whether the models that are loaded at startup are there."""
        return self._started

    def unavailable_reason(self) -> str:
        """Why loaded models do not answer (a process of the job is silent); "": they do."""
        group = current_group()
        return "" if group is None else group.complaint()

    async def start(self) -> None:
        """Loads as many models as may be in memory.

        Raises:
            USER_ERRORS: a model cannot be loaded.
        """
        # Loading in the event loop would block other requests.
        start_threads(self.workers, _WORKERS)
        for one in self.models[: self._most]:
            async with self._changed:
                one.state = "loading"
            await self._load(one)
            if one.state == "failed":
                raise http_errors.ApiError(503, one.error)
        self._started = True

    def refuse_requests(self) -> None:
        """Refuses new requests; running ones continue."""
        self._closing = True
        if (group := current_group()) is not None:
            group.is_leaving = True

    async def close(self) -> None:
        """Unloads every model."""
        loop = asyncio.get_running_loop()
        for one in self.models:
            if one.state == "ready":
                await loop.run_in_executor(self._loader, one.llm.close)
        for pool in (self._loader, self.workers, self.waiters, self.compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, Stats]:
        """The statistics of each loaded model."""
        return {one.name: one.llm.stats() for one in self.models if one.state == "ready"}

    def by_name(self, name: str | None) -> ServedModel:
        """The model of that name; None: the first. Raises `ApiError` if there is none."""
        if name is None:
            return self.models[0]
        for one in self.models:
            if name in one.names:
                return one
        for one in self.models:
            if name in one.adapters:
                return one
        raise http_errors.unknown_model(name, [one.name for one in self.models])

    def find(self, name: str | None) -> ServedModel:
        """The model that a request means. Raises `ApiError` if there is none."""
        return self.models[0] if self._any_name else self.by_name(name)

    def answers_to(self, name: str) -> bool:
        """Whether the only model answers requests for another name."""
        one = self.models[0]
        return self._any_name and name not in (*one.names, *one.adapters)

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model for a request, loaded if needed and kept in memory meanwhile.

        Raises:
            ApiError: the name is unknown, the model is still loading or could not be loaded, the
                server is shutting down, or a process of the job does not respond.
        """
        one = self.find(name)
        if self._closing:
            raise http_errors.shutting_down()
        if not self._started and one.state != "ready":
            raise http_errors.model_loading()
        if reason := self.unavailable_reason():
            raise http_errors.process_unresponsive(reason)
        one.users += 1
        try:
            if one.state != "ready":
                self.waiting += 1
                try:
                    await self._ensure_loaded(one)
                finally:
                    self.waiting -= 1
            one.last_used = time.monotonic()
            yield one
        finally:
            one.users -= 1
            one.last_used = time.monotonic()
            if len(self.models) > self._most:
                async with self._changed:
                    self._changed.notify_all()

    async def _ensure_loaded(self, one: ServedModel) -> None:
        """Loads a model, unloading another one if there is no room."""
        async with self._changed:
            while one.state in ("absent", "loading"):
                loaded = [each for each in self.models if each.state in ("ready", "loading")]
                if one.state == "absent" and len(loaded) < self._most:
                    one.state = "loading"
                    task = asyncio.ensure_future(self._load(one))
                    task.add_done_callback(lambda done: done.exception())
                elif one.state == "absent" and (idle := _least_recently_used(loaded)) is not None:
                    idle.state = "absent"
                    await self._unload(idle)
                    continue
                await self._changed.wait()
            if one.state == "failed":
                # The next request tries again: the file may have been repaired.
                one.state = "absent"
                raise http_errors.ApiError(503, f"{one.name} could not be loaded: {one.error}")

    async def _load(self, one: ServedModel) -> None:
        """Loads a model in a worker thread."""
        begun = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            one._llm = await loop.run_in_executor(self._loader, _open_llm, one.source)
            one.parameters = sizes_of(one.llm.spec, one.session.engine.model).parameters
            state: LoadState = "ready"
        except USER_ERRORS as error:
            state, one.error = "failed", str(error)
            _log.error("%s: %s", one.name, error)
        except Exception as error:
            state, one.error = "failed", f"{type(error).__name__}: {error}"
            _log.exception("%s could not be loaded", one.name)
        async with self._changed:
            one.state = state
            self._changed.notify_all()
        if state == "ready":
            seconds = round(time.perf_counter() - begun, 3)
            _log.info("model loaded", extra={"model": one.name, "seconds": seconds})
            if self._warm_up:
                engine = one.session.engine
                engine.programs.announce(all_shapes(engine))
                self.workers.submit(_warm_up_constraints, one.llm)

    async def _unload(self, one: ServedModel) -> None:
        llm, one._llm = one.llm, None
        self._unloaded(one.name, llm.stats())
        _log.info("model unloaded", extra={"model": one.name})
        await asyncio.get_running_loop().run_in_executor(self._loader, llm.close)


def _least_recently_used(loaded: Sequence[ServedModel]) -> ServedModel | None:
    """The least recently used model among those without requests."""
    idle = [one for one in loaded if one.state == "ready" and not one.users]
    return min(idle, key=lambda one: one.last_used, default=None)


def _open_llm(source: ModelSource) -> LLM:
    # The warm-up's programs are compiled while the weights are read.
    llm = LLM(source.path, first=lambda llm: [0] * _WARM_UP_TOKENS, **source.overrides)
    if llm.spec.engine.warm_up:
        _warm_up_constraints(llm)
    return llm


def _warm_up_constraints(llm: LLM) -> None:
    """Builds the vocabulary tables of structured outputs before the first constraint needs them."""
    from jinfer.sampling.structured import compile_constraint  # not needed at startup

    if llm.tokenizer is not None and llm.spec.generates:
        with contextlib.suppress(ConstraintError):
            compile_constraint(llm.tokenizer, json_schema=True)
