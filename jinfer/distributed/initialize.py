"""Joining a job: every process finds all others, and then JAX is told.

What is wrong shows here, as one line for each: JAX itself would end the process with a dump.
Process 0 waits at the job's address. The others tell it who they are and where they listen, and
are told of one another; JAX's own service is reached through processes that know the job's key.
Whoever calls is heard beside the others, and strangers are turned away with a line.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import jax

from jinfer.distributed.collective_address import listen_at
from jinfer.distributed.connection import (
    Link,
    LinkError,
    MessageError,
    StrangerError,
    has_key,
    known,
)
from jinfer.distributed.coordinator_proxy import Passage
from jinfer.distributed.incoming_connections import Callers, address, listen, listening
from jinfer.distributed.job_config import Job
from jinfer.distributed.message_schemas import Hello, Welcome, place, read_welcome
from jinfer.distributed.process_group import Group, become
from jinfer.distributed.shared_compile_cache import keep_programs
from jinfer.distributed.wire_format import FrameError
from jinfer.opening.sources import SourceError
from jinfer.progress import task
from jinfer.version import __version__

PATIENCE = "JINFER_JOIN_SECONDS"  # of the environment: that the others may take to start
SECONDS = 300.0  # where it says nothing
_PAUSE, _ANSWER = 0.25, 20.0  # seconds between two calls, and for an answer
_TRIES = 3  # calls that end before the other side has shown who it is
# Seconds after which JAX's service takes a process that does not answer for lost. `Group` knows
# better, and a process that was stopped for some time may go on.
_NEVER = 30 * 86_400


def join(job: Job) -> Group:
    """Joins a job, of which this process is from now on; to be called before JAX computes.

    Raises:
        SourceError: somebody cannot be reached, or is not of this job.
    """
    deadline = time.monotonic() + _patience()
    links: dict[int, Link] = {}
    passage = Passage()
    try:
        (_call if job.rank else _lead)(job, deadline, links, passage)
    except BaseException:
        for link in links.values():
            link.close()
        passage.close()
        raise
    _aside()
    keep_programs()
    for link in links.values():
        link.wait(None)
    mute = listen_at(links[1 if job.rank == 0 else 0].host)
    # Before JAX waits for the others: one may be lost meanwhile.
    group = Group(job.rank, job.size, links, mute=mute, farewells=[passage.farewell])
    try:
        _initialize(job, passage.service)
    except BaseException:
        group.forsake()
        raise
    become(group)
    return group


def _lead(job: Job, deadline: float, links: dict[int, Link], passage: Passage) -> None:
    """Process 0: waits for all others; tells them of one another, and where JAX's service is."""
    heard: dict[int, str] = {}
    turned = ""

    def missing() -> str:
        left = [str(n) for n in range(1, job.size) if n not in links]
        return f"process{'es' * (len(left) > 1)} {', '.join(left)} of {job.size}"

    def refuse(reason: str, *more: Link) -> SourceError:
        for link in (*links.values(), *more):
            with suppress(LinkError):
                link.send({"refused": reason})
        for link in more:
            link.close()
        return SourceError(reason)

    with (
        listening(job.host, job.port) as listener,
        _heard(listener) as callers,
        task(f"waiting for {missing()}") as waiting,
    ):
        while len(links) < job.size - 1:
            waiting.say(f"waiting for {missing()}")
            try:
                link, said = callers.next(deadline)
            except TimeoutError:
                more = f" ({turned})" if turned else ""
                reason = f"{missing()} did not join in time; see whether they run{more}"
                raise refuse(reason) from None
            if not said.at:
                callers.turn_away(link, "it does not say where it waits")
            elif not (reason := _wrong(job, said, links)):
                if said.process in links:  # it has been started anew
                    links[said.process].close()
                links[said.process], heard[said.process] = link, said.at
            elif has_key():
                raise refuse(reason, link)
            else:  # of anybody, who may not end the job
                turned = reason
                callers.turn_away(link, reason, told=True)
        way = listen(listener.getsockname()[0], 0)
        passage.lead(way, job.size)
    for rank, link in links.items():
        # Seen from there: this host's address, and the others'.
        service = address(link.host, way.getsockname()[1])
        before = {str(other): at for other, at in heard.items() if other < rank}
        try:
            link.wait(_ANSWER)
            link.send({"service": service, "before": before})
        except LinkError:
            raise refuse(f"process {rank} at {link.where} ended before all had joined") from None


def _wrong(job: Job, said: Hello, links: dict[int, Link]) -> str:
    """What is wrong with a process; "": nothing."""
    rank, size = said.process, said.processes
    if size != job.size:
        return f"process {rank} was told of {size} processes, and process 0 of {job.size}"
    if rank == 0 or (rank in links and not links[rank].ended):
        return f"two processes have the number {rank}; give each its own --process"
    for what, theirs in (("jinfer", said.jinfer), ("jax", said.jax)):
        if theirs != (here := _versions()[what]):
            return f"process {rank} has {what} {theirs}, and process 0 has {here}"
    return ""


def _call(job: Job, deadline: float, links: dict[int, Link], passage: Passage) -> None:
    """Another process: calls process 0, and those with numbers between; as `_lead`."""
    first = links[0] = _reached(job.host, job.port, deadline, "process 0")
    with listening(first.host, 0) as listener, _heard(listener) as callers:
        at = address(*listener.getsockname()[:2])
        mine = Hello(job.rank, job.size, **_versions())
        told = _welcomed(first, replace(mine, at=at), deadline)
        for other, where in sorted(told.before.items()):
            link = _reached(*place(where), deadline, f"process {other}")
            links[int(other)] = link
            with suppress(LinkError):  # the group finds that it is lost
                link.send(asdict(mine))
        while len(links) < job.size - 1:
            try:
                link, said = callers.next(deadline)
            except TimeoutError:
                missing = ", ".join(str(n) for n in range(job.size) if n not in {*links, job.rank})
                raise SourceError(f"process {missing} of {job.size} did not call in time") from None
            if said.processes != job.size or said.process in links or said.process <= job.rank:
                callers.turn_away(link, "it is not of this job")
            else:
                links[said.process] = link
    passage.call(place(told.service), mine)


def _welcomed(first: Link, mine: Hello, deadline: float) -> Welcome:
    """What process 0 answers, once all have called. Raises `SourceError`."""
    try:
        first.wait(_ANSWER)
        first.send(asdict(mine))
        first.wait(max(1.0, deadline - time.monotonic()) + _ANSWER)
        with task("waiting for the other processes"):
            told = read_welcome(first.receive())
    except (MessageError, FrameError) as error:
        raise SourceError(f"process 0 at {first.where} cannot be understood: {error}") from None
    except LinkError:
        raise SourceError("process 0 ended before all had joined; see what it says") from None
    if told.refused:
        raise SourceError(told.refused)
    return told


@contextmanager
def _heard(listener: socket.socket) -> Iterator[Callers]:
    callers = Callers(listener)
    try:
        yield callers
    finally:
        callers.close()


def _patience() -> float:
    given = os.environ.get(PATIENCE, str(SECONDS))
    try:
        return float(given)
    except ValueError:
        raise SourceError(f"{PATIENCE}={given!r}: write seconds, such as {SECONDS:g}") from None


def _versions() -> dict[str, str]:
    return {"jinfer": __version__, "jax": jax.__version__}


def _reached(host: str, port: int, deadline: float, who: str) -> Link:
    """A link to a process that may yet have to start. Raises `SourceError`."""
    broken, where = 0, address(host, port)
    with task(f"waiting for {who} at {where}"):
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=_ANSWER)
                return known(connection, called=True, seconds=_ANSWER)
            except LinkError as error:
                # Among many strangers a process may be cut short, though not each time.
                broken += 1
                if isinstance(error, StrangerError) or broken == _TRIES:
                    raise SourceError(f"{who} at {where}: {error}") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    reason = f"{who} cannot be reached at {where}: {error.strerror or error}"
                    raise SourceError(f"{reason}; see whether it runs, and --coordinator") from None
            time.sleep(_PAUSE)


def _aside() -> None:
    """What gloo prints must not be taken for an answer: from here on only Python's own is one."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    os.dup2(2, 1)


def _initialize(job: Job, service: str) -> None:
    """Tells JAX. Raises `SourceError`."""
    # It would take SIGTERM, which is the server's.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            service,
            job.size,
            job.rank,
            local_device_ids=job.devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=service,
            heartbeat_timeout_seconds=_NEVER,
            shutdown_timeout_seconds=10,
        )
    except RuntimeError as error:
        raise SourceError(f"JAX cannot join the job: {' '.join(str(error).split())}") from None
