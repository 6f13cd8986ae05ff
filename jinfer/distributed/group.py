"""The processes of a job as one of them sees them: what they say, and when one is lost."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any

from jinfer.distributed.link import Link, LinkError
from jinfer.distributed.results import Results
from jinfer.opening.sources import SourceError
from jinfer.records import dataclass, field

LOST = 3  # the exit status of whoever loses another process
_PARTING = 10.0  # seconds that others may take to end


@dataclass(eq=False)
class Group:
    """A job of several processes.

    Attributes:
        rank, size: the number of this process, and how many there are.
        links: to each other process.
        said: messages of each other process, in their order.
        results: what calls give.
        calls: numbers of calls, no two of which are the same in a job.
    """

    rank: int
    size: int
    links: Mapping[int, Link]
    said: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    calls: Iterator[int] = field(default_factory=count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gone: dict[int, threading.Event] = field(default_factory=dict)
    _ending: bool = False

    def __post_init__(self) -> None:
        for other, link in self.links.items():
            self.said[other], self._gone[other] = SimpleQueue(), threading.Event()
            reader = threading.Thread(
                target=self._read, args=(other, link), name=f"process {other}", daemon=True
            )
            reader.start()

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
            print(f"error: {reason}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def fail(self, error: BaseException) -> None:
        """Ends the job because something failed here that nobody can mend."""
        reason = f"process {self.rank} failed: {type(error).__name__}: {error}"
        self.end(LOST, reason)
        self.leave(LOST, reason)

    def _read(self, other: int, link: Link) -> None:
        while True:
            try:
                message = link.receive()
            except LinkError:
                self._gone[other].set()
                self._lost(other)
                return
            if "result" in message:
                self.results.put(message["call"], message["result"], message["value"])
            elif "end" in message:
                given = message["end"], message["reason"]
                threading.Thread(target=self._ended, args=given, daemon=True).start()
            else:
                self.said[other].put(message)

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

    def _lost(self, other: int) -> None:
        with self._lock:
            if self._ending:
                return
            self._ending = True
        where = self.links[other].where
        self.leave(LOST, f"process {other} of {self.size} at {where} was lost; the job ends")


_current: Group | None = None


def current() -> Group | None:
    """The job that this process has joined, if any."""
    return _current


def lead() -> None:
    """Raises `SourceError` in a process that follows another one."""
    if _current is not None and _current.rank:
        raise SourceError(
            f"process {_current.rank} of {_current.size} follows process 0, which has the model; "
            "call jinfer.following.follow here"
        )


def become(group: Group | None) -> None:
    """From now on this is the job."""
    global _current
    _current = group
