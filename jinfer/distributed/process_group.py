"""The processes of a job as one of them sees them: what they say, and when one is lost."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any

from jinfer.distributed.connection import Link, LinkError, MessageError
from jinfer.distributed.futures import Results
from jinfer.distributed.message_schemas import kind
from jinfer.distributed.wire_format import FrameError
from jinfer.opening.sources import SourceError

LOST = 3  # the exit status of whoever loses another process
_PARTING = 10.0  # seconds that others may take to end
_BEAT = 2.0  # seconds between two signs of life
_SHOWS = 1.0  # seconds in which it shows that another process is lost
SILENT = 10.0  # seconds without one after which a process is said not to answer
_log = logging.getLogger("jinfer")


@dataclass(eq=False)
class Group:
    """A job of several processes.

    Attributes:
        rank, size: the number of this process, and how many there are.
        links: to each other process.
        said: messages of each other process, in their order.
        results: what calls give.
        calls: numbers of calls, no two of which are the same in a job.
        mute: why devices of several processes cannot exchange sums; "": they can.
        parting: whether this process is about to end, and waits for no other one that does not
            answer.
        farewells: are told why this process ends, before it does, and may take a second each.
    """

    rank: int
    size: int
    links: Mapping[int, Link]
    said: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    calls: Iterator[int] = field(default_factory=count)
    mute: str = ""
    parting: bool = False
    farewells: list[Callable[[str], object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gone: dict[int, threading.Event] = field(default_factory=dict)
    _one_gone: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, float] = field(default_factory=dict)
    _ending: bool = False

    def __post_init__(self) -> None:
        for other, link in self.links.items():
            self.said[other], self._gone[other] = SimpleQueue(), threading.Event()
            self._heard[other] = time.monotonic()
            for work in (self._read, self._beat):
                thread = threading.Thread(
                    target=work, args=(other, link), name=f"process {other}", daemon=True
                )
                thread.start()

    def tell(self, other: int, **message: Any) -> None:
        """Says something to another process."""
        try:
            self.links[other].send(message)
        except LinkError:
            self._lost(other)

    def tell_all(self, **message: Any) -> None:
        """Says something to all others."""
        for other in self.links:
            self.tell(other, **message)

    def hear(self, other: int) -> Any:
        """The next message of another process; waits for it."""
        return self.said[other].get()

    def silence(self, other: int) -> float:
        """Seconds since another process gave a sign of life, which it does all the time."""
        return time.monotonic() - self._heard[other]

    def complaint(self) -> str:
        """Which other process does not answer; "": all do."""
        for other in self.links:
            if (seconds := self.silence(other)) > SILENT:
                return f"{self._named(other)} has not answered for {seconds:.0f} s"
        return ""

    def gathered(self, value: Any) -> list[Any]:
        """What each process gives, in process 0; in the others their own alone."""
        if self.rank:
            self.tell(0, value=value)
            return [value]
        return [value, *(self.hear(other)["value"] for other in range(1, self.size))]

    def shared(self, value: Any) -> Any:
        """What process 0 gives, in all processes."""
        if self.rank:
            return self.hear(0)["value"]
        self.tell_all(value=value)
        return value

    def end(self, status: int = 0, reason: str = "") -> None:
        """Ends the job, for all processes; this one goes on alone, to its own end.

        Args:
            status: with which the others exit.
            reason: what they say.
        """
        with self._lock:
            begun, self._ending = self._ending, True
        if begun:  # by another process, and a thread is about to end this one
            threading.Event().wait()
        for link in self.links.values():
            with suppress(LinkError):  # it has ended already
                link.send({"end": status, "reason": reason})
        if status != LOST:
            self._part()

    def leave(self, status: int, reason: str) -> None:
        """Ends this process at once, with a line."""
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        for farewell in self.farewells:
            with suppress(Exception):  # nothing keeps it from ending
                farewell(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def fail(self, error: BaseException) -> None:
        """Ends the job because something failed here that nobody can mend."""
        # A sum with a process that is lost fails as well, perhaps before anything else shows it.
        if self._one_gone.wait(_SHOWS):
            threading.Event().wait()  # whoever has seen it ends this process
        said = " ".join(str(error).split())
        reason = f"process {self.rank} failed: {type(error).__name__}: {said}"
        self.end(LOST, reason)
        self.leave(LOST, reason)

    def forsake(self) -> None:
        """The job does not begin: whoever is lost from now on is none of it."""
        with self._lock:
            self._ending = True
        for gone in self._gone.values():
            gone.set()

    def _read(self, other: int, link: Link) -> None:
        while True:
            try:
                message = link.receive()
                what = kind(message)
            except (LinkError, FrameError) as error:
                self._gone[other].set()
                self._one_gone.set()
                unread = isinstance(error, MessageError | FrameError)
                self._lost(other, f"sent what cannot be read: {error}" if unread else "was lost")
                return
            self._heard[other] = time.monotonic()
            match what:
                case "beat":
                    pass
                case "result":
                    self.results.put(message["call"], message["result"], message["value"])
                case "end":
                    given = message["end"], message["reason"]
                    threading.Thread(target=self._ended, args=given, daemon=True).start()
                case _:
                    self.said[other].put(message)

    def _beat(self, other: int, link: Link) -> None:
        """Gives signs of life, and says when another process gives none, and gives some again."""
        missed = 0  # beats of this process
        said = False
        for number in count():
            if self._gone[other].wait(_BEAT):
                return
            if self.parting and self.silence(other) > SILENT:
                self.leave(LOST, f"{self._named(other)} does not answer; the job ends without it")
            # Twice, as this process may have been stopped itself.
            missed = missed + 1 if self.silence(other) > SILENT else 0
            if (missed > 1) != said:
                said = not said
                change = "does not answer; what needs it waits" if said else "answers again"
                _log.warning("%s %s", self._named(other), change)
            try:
                link.send({"beat": number})
            except LinkError:
                return  # whoever reads knows

    def _ended(self, status: int, reason: str) -> None:
        """Another process ends the job, and this one with it, whatever it does at the moment."""
        with self._lock:
            begun, self._ending = self._ending, True
        if begun:
            return
        if status != LOST:
            self._part()
        self.leave(status, reason)

    def _part(self) -> None:
        """Ends JAX's own connections; each process waits for the others to do so."""
        import jax
        from jax._src import distributed

        state = distributed.global_state
        if self.rank == 0 and state.client is not None:
            # The service has to answer the others until they have gone, which JAX does not see to.
            state.client.shutdown()
            state.client = None
            for gone in self._gone.values():
                gone.wait(_PARTING)
        jax.distributed.shutdown()

    def _lost(self, other: int, how: str = "was lost") -> None:
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self.leave(LOST, f"{self._named(other)} {how}; the job ends")

    def _named(self, other: int) -> str:
        return f"process {other} of {self.size} at {self.links[other].where}"


_current: Group | None = None


def current() -> Group | None:
    """The job that this process has joined, if any."""
    return _current


def lead() -> None:
    """Raises `SourceError` in a process that follows another one."""
    if _current is not None and _current.rank:
        raise SourceError(
            f"process {_current.rank} of {_current.size} follows process 0, which has the model; "
            "call jinfer.api.job_processes.follow here"
        )


def become(group: Group | None) -> None:
    """From now on this is the job."""
    global _current
    _current = group
