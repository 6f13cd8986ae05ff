"""Served model: a model of the server, its state, and its users."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from jinfer.api.llm import LLM
from jinfer.api.session import Session
from jinfer.engine.engine_stats import Stats
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.server_settings import ModelSource
from jinfer.server.models.model_details import ModelDetails
from jinfer.server.models.model_worker import ModelWorker

LoadState = Literal["unloaded", "loading", "loaded", "sleeping", "unloading"]


@dataclass(eq=False)
class ServedModel:
    """A model that the server offers. Only the event loop's thread changes it.

    Attributes:
        source: its name, its path and its settings.
        state: whether it is loaded; "unloading" also while it falls asleep.
        users: number of requests that are using it.
        waiters: number of requests that wait for it.
        unload_waiters: number of requests that wait for its unloading; no other may start
        unload_count: number of times that it was unloaded or fell asleep.
        removed: whether it was removed.
        last_used: time of the last use, in seconds of `time.monotonic`.
        keep: seconds that it stays in memory after its last request; None: no limit.
        sleep_level: the level of a sleeping model (`LLM.sleep`).
        error: why it cannot be loaded; "": no known reason.
        file_bytes: bytes of the weight files; 0: not known.
        details: sizes, format and capabilities, once it was opened.
        created: when the server began to offer it.
        load_result: future for waiting requests: None once it is loaded, or the error.
        timers: idle timers.
        llm_or_none: the loaded or sleeping model; None: unloaded.
    """

    source: ModelSource
    state: LoadState = "unloaded"
    users: int = 0
    waiters: int = 0
    unload_waiters: int = 0
    unload_count: int = 0
    removed: bool = False
    last_used: float = 0.0
    keep: float | None = None
    sleep_level: int = 0
    error: str = ""
    file_bytes: int = 0
    details: ModelDetails | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    load_result: asyncio.Future[ApiError | None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    llm_or_none: LLM | ModelWorker | None = None

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.source.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names: also its path, and its names with Ollama's default tag."""
        own = (self.name, *self.source.aliases)
        return *own, self.source.path, *(f"{name}:latest" for name in own)

    @property
    def llm(self) -> LLM:
        """The model that is loaded in this process, awake or asleep."""
        assert isinstance(self.llm_or_none, LLM), f"{self.name} is not loaded here"
        return self.llm_or_none

    @property
    def loaded(self) -> LLM | ModelWorker:
        """The loaded model of any process, awake or asleep."""
        assert self.llm_or_none is not None, f"{self.name} is not loaded"
        return self.llm_or_none

    @property
    def worker(self) -> ModelWorker | None:
        """The model's own process; None without such a process."""
        return self.llm_or_none if isinstance(self.llm_or_none, ModelWorker) else None

    @property
    def open(self) -> bool:
        """Whether it is loaded, awake or asleep."""
        return self.llm_or_none is not None and self.state in ("loaded", "sleeping")

    @property
    def adapters(self) -> list[str]:
        """Names of its loaded LoRA adapters, which requests may use as model names."""
        return [*self.adapter_sources]

    @property
    def adapter_sources(self) -> dict[str, str]:
        """Loaded LoRA adapters: name -> source."""
        if not self.open:
            return {}
        if self.worker is not None:
            return self.worker.adapters
        adapters = self.session.adapters
        return {name: adapters.sources.get(name, "") for name in adapters.loaded}

    @property
    def stats(self) -> Stats | None:
        """Statistics; None: not in memory. Statistics of another process may be old."""
        if self.llm_or_none is None:
            return None
        return self.worker.last if self.worker is not None else self.llm.stats()

    @property
    def session(self) -> Session:
        """The engine session of the loaded model."""
        return self.llm.session

    @property
    def in_memory(self) -> bool:
        """Whether it counts as a model in memory."""
        if self.state == "sleeping":
            return self.sleep_level == 1  # its weights are in the host's memory
        return self.state != "unloaded"

    @property
    def can_unload(self) -> bool:
        """Whether it may be unloaded to make room."""
        at_rest = self.state == "loaded" or (self.state == "sleeping" and self.in_memory)
        return at_rest and not self.users and not self.waiters and not self.source.pinned

    def is_unloaded(self, level: int) -> bool:
        """Return whether it is unloaded, or sleeps at this level."""
        asleep = self.state == "sleeping" and self.sleep_level >= level > 0
        return self.state == "unloaded" or asleep

    def cancel_timers(self) -> None:
        """Cancel the idle timers."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
