"""Process group: messages between the ranks of a job, heartbeats, and what to do on a loss."""

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
from jinfer.distributed.futures import PendingResults
from jinfer.distributed.message_schemas import message_kind
from jinfer.distributed.wire_format import FrameError

LOST = 3  # exit status of a process that has lost another one
_PARTING = 10.0  # seconds that others may take to end
_BEAT = 2.0  # seconds between heartbeats
_SHOWS = 1.0  # seconds in which the loss of another process is noticed
SILENT = 10.0  # seconds without a heartbeat after which a process counts as not answering
_log = logging.getLogger("jinfer")


@dataclass(eq=False)
class ProcessGroup:
    """The processes of a job, as one of them sees them.

    Attributes:
        rank: this process's rank.
        size: how many processes there are.
        links: connections to the other ranks.
        inboxes: received messages of each other rank, in order.
        results: results of calls that this rank waits for.
        calls: numbers for calls, unique in the job.
        mute: why collectives between devices of several ranks are not possible; "": they are.
        parting: whether this process is about to end, and does not wait for silent ranks.
        farewells: called with the reason before this process ends; each may take a second.
    """

    rank: int
    size: int
    links: Mapping[int, Link]
    inboxes: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    results: PendingResults = field(default_factory=PendingResults)
    calls: Iterator[int] = field(default_factory=count)
    no_collectives: str = ""
    is_leaving: bool = False
    exit_callbacks: list[Callable[[str], object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gone: dict[int, threading.Event] = field(default_factory=dict)
    _one_gone: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, float] = field(default_factory=dict)
    _ending: bool = False

    def __post_init__(self) -> None:
        for other, link in self.links.items():
            self.inboxes[other], self._gone[other] = SimpleQueue(), threading.Event()
            self._heard[other] = time.monotonic()
            for work in (self._read, self._beat):
                thread = threading.Thread(
                    target=work, args=(other, link), name=f"process {other}", daemon=True
                )
                thread.start()

    def send(self, other: int, **message: Any) -> None:
        """Sends a message to another rank."""
        try:
            self.links[other].send(message)
        except LinkError:
            self._lost(other)

    def send_to_all(self, **message: Any) -> None:
        """Sends a message to all other ranks."""
        for other in self.links:
            self.send(other, **message)

    def receive_from(self, other: int) -> Any:
        """The next message of another rank; waits for it."""
        return self.inboxes[other].get()

    def seconds_silent(self, other: int) -> float:
        """Seconds since the last message or heartbeat of another rank."""
        return time.monotonic() - self._heard[other]

    def complaint(self) -> str:
        """Names a rank that does not answer; "": all do."""
        for other in self.links:
            if (seconds := self.seconds_silent(other)) > SILENT:
                return f"{self._named(other)} has not answered for {seconds:.0f} s"
        return ""

    def gather(self, value: Any) -> list[Any]:
        """Gather: the values of all ranks on rank 0; on the others their own only."""
        if self.rank:
            self.send(0, value=value)
            return [value]
        return [value, *(self.receive_from(other)["value"] for other in range(1, self.size))]

    def broadcast(self, value: Any) -> Any:
        """Broadcast: rank 0's value on all ranks."""
        if self.rank:
            return self.receive_from(0)["value"]
        self.send_to_all(value=value)
        return value

    def end(self, status: int = 0, reason: str = "") -> None:
        """Ends the job for all other ranks; this process goes on alone.

        Args:
            status: the exit status of the others.
            reason: the error that they show.
        """
        with self._lock:
            begun, self._ending = self._ending, True
        if begun:  # by another rank: a thread is about to end this process
            threading.Event().wait()
        for link in self.links.values():
            with suppress(LinkError):  # that rank has ended already
                link.send({"end": status, "reason": reason})
        if status != LOST:
            self._part()

    def leave(self, status: int, reason: str) -> None:
        """Ends this process at once, with a line on stderr."""
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        for farewell in self.exit_callbacks:
            with suppress(Exception):  # the process ends in any case
                farewell(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def fail(self, error: BaseException) -> None:
        """Ends the job because of an error on this rank."""
        # A collective with a lost rank fails too, possibly before the lost connection is noticed:
        # then the loss is the reason to show.
        if self._one_gone.wait(_SHOWS):
            threading.Event().wait()  # the thread that noticed the loss ends this process
        said = " ".join(str(error).split())
        reason = f"process {self.rank} failed: {type(error).__name__}: {said}"
        self.end(LOST, reason)
        self.leave(LOST, reason)

    def abandon(self) -> None:
        """The rendezvous has failed: the loss of a rank no longer ends this process."""
        with self._lock:
            self._ending = True
        for gone in self._gone.values():
            gone.set()

    def _read(self, other: int, link: Link) -> None:
        while True:
            try:
                message = link.receive()
                what = message_kind(message)
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
                    ending = message["end"], message["reason"]
                    threading.Thread(target=self._ended, args=ending, daemon=True).start()
                case _:
                    self.inboxes[other].put(message)

    def _beat(self, other: int, link: Link) -> None:
        """Sends heartbeats, and logs when another rank's are missing, and when they come again."""
        missed = 0  # checks in a row that found the other rank silent
        reported = False
        for number in count():
            if self._gone[other].wait(_BEAT):
                return
            if self.is_leaving and self.seconds_silent(other) > SILENT:
                self.leave(LOST, f"{self._named(other)} does not answer; the job ends without it")
            # Two checks in a row, since this process may itself have been stopped.
            missed = missed + 1 if self.seconds_silent(other) > SILENT else 0
            if (missed > 1) != reported:
                reported = not reported
                change = "does not answer; what needs it waits" if reported else "answers again"
                _log.warning("%s %s", self._named(other), change)
            try:
                link.send({"beat": number})
            except LinkError:
                return  # the reading thread handles the loss

    def _ended(self, status: int, reason: str) -> None:
        """Ends this process, whatever it is doing, because another rank has ended the job."""
        with self._lock:
            begun, self._ending = self._ending, True
        if begun:
            return
        if status != LOST:
            self._part()
        self.leave(status, reason)

    def _part(self) -> None:
        """Closes JAX's own connections; each rank waits for the others to do so."""
        import jax
        from jax._src import distributed

        state = distributed.global_state
        if self.rank == 0 and state.client is not None:
            # The service has to outlive the other ranks' connections; JAX does not ensure that.
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
