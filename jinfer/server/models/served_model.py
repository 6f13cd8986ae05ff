"""Served model: one that a server offers, its state, and who uses it or waits for it."""

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
        leaving: number of requests that wait for it to leave: no other may begin to use it.
        departures: how often it has left, or fallen asleep.
        gone: it is not offered any more.
        last_used: when a request last used it, in seconds of `time.monotonic`.
        keep: seconds that it stays in memory after its last request; None: as long as may be.
        sleep_level: while it sleeps, which level (`LLM.sleep`).
        error: why it could not be loaded, or cannot be; "": nothing is known against it.
        file_bytes: of its weights' files; 0: not known.
        details: its sizes, format and abilities, once it was opened.
        created: when the server began to offer it.
        arrival: what those who wait for it await: None once it is loaded, or why it is not.
        timers: what is to come if nobody uses it.
        llm_or_none: the model, loaded or asleep; None: it is neither.
    """

    source: ModelSource
    state: LoadState = "unloaded"
    users: int = 0
    waiters: int = 0
    leaving: int = 0
    departures: int = 0
    gone: bool = False
    last_used: float = 0.0
    keep: float | None = None
    sleep_level: int = 0
    error: str = ""
    file_bytes: int = 0
    details: ModelDetails | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    arrival: asyncio.Future[ApiError | None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    llm_or_none: LLM | ModelWorker | None = None

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.source.name

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it: its path too, and its names with Ollama's default tag."""
        own = (self.name, *self.source.aliases)
        return *own, self.source.path, *(f"{name}:latest" for name in own)

    @property
    def llm(self) -> LLM:
        """The model that is loaded in this process, awake or asleep."""
        assert isinstance(self.llm_or_none, LLM), f"{self.name} is not loaded here"
        return self.llm_or_none

    @property
    def loaded(self) -> LLM | ModelWorker:
        """The loaded model, wherever it is, awake or asleep."""
        assert self.llm_or_none is not None, f"{self.name} is not loaded"
        return self.llm_or_none

    @property
    def worker(self) -> ModelWorker | None:
        """The model's own process; None: it has none."""
        return self.llm_or_none if isinstance(self.llm_or_none, ModelWorker) else None

    @property
    def open(self) -> bool:
        """Whether it is there, awake or asleep."""
        return self.llm_or_none is not None and self.state in ("loaded", "sleeping")

    @property
    def adapters(self) -> list[str]:
        """Name of the LoRA adapters that are loaded beside it, which are names of models too."""
        return [*self.adapter_sources]

    @property
    def adapter_sources(self) -> dict[str, str]:
        """Name of the LoRA adapters that are loaded beside it, and where each is from."""
        if not self.open:
            return {}
        if self.worker is not None:
            return self.worker.adapters
        adapters = self.session.adapters
        return {name: adapters.sources.get(name, "") for name in adapters.loaded}

    @property
    def stats(self) -> Stats | None:
        """Its statistics; None: it is not in memory. Those of another process are a while old."""
        if self.llm_or_none is None:
            return None
        return self.worker.last if self.worker is not None else self.llm.stats()

    @property
    def session(self) -> Session:
        """The engine session of the loaded model."""
        return self.llm.session

    @property
    def occupies(self) -> bool:
        """Whether it has a place among the models that may be in memory at a time."""
        if self.state == "sleeping":
            return self.sleep_level == 1  # its weights are in the host's memory
        return self.state != "unloaded"

    @property
    def may_leave(self) -> bool:
        """Whether it can make room for another one."""
        at_rest = self.state == "loaded" or (self.state == "sleeping" and self.occupies)
        return at_rest and not self.users and not self.waiters and not self.source.pinned

    def has_left(self, level: int) -> bool:
        """Whether it is unloaded, or sleeps as deeply."""
        asleep = self.state == "sleeping" and self.sleep_level >= level > 0
        return self.state == "unloaded" or asleep

    def cancel_timers(self) -> None:
        """Nothing happens to it any more."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
