"""Rendezvous: all ranks of a job connect to each other, then JAX's distributed runtime starts.

Rank 0 listens at the job's address. Each other rank sends it a `Hello` with its rank, its versions
and the address where it listens itself, and gets a `Welcome` with the addresses of lower ranks.
Errors are one line each and show here, before `jax.distributed.initialize`, which would abort the
process with a stack dump. Callers are authenticated concurrently; strangers are turned away.
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
    authenticate,
    has_key,
)
from jinfer.distributed.coordinator_proxy import CoordinatorProxy
from jinfer.distributed.current_group import set_current_group
from jinfer.distributed.incoming_connections import IncomingConnections, listen, listening
from jinfer.distributed.job_config import JobConfig
from jinfer.distributed.message_schemas import (
    Hello,
    Welcome,
    format_address,
    parse_address,
    read_welcome,
)
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.shared_compile_cache import cache_on_every_rank
from jinfer.distributed.wire_format import FrameError
from jinfer.loader.config.source_errors import SourceError
from jinfer.progress import task
from jinfer.version import __version__

# Environment variable: how long the other ranks may take to start; and its default.
JOIN_SECONDS_VARIABLE, JOIN_SECONDS = "JINFER_JOIN_SECONDS", 300.0
_PAUSE, _ANSWER = 0.25, 20.0  # seconds between connection attempts, and for an answer
_TRIES = 3  # connections that may break before the other side has authenticated
# JAX's heartbeat timeout, in effect off: `ProcessGroup` has its own heartbeats, and a process that
# was stopped for a while may go on.
_NEVER = 30 * 86_400


def join_job(job: JobConfig) -> ProcessGroup:
    """Joins a job; to be called before JAX initializes its devices.

    Raises:
        SourceError: a rank cannot be reached, or does not belong to this job.
    """
    deadline = time.monotonic() + _join_seconds()
    links: dict[int, Link] = {}
    passage = CoordinatorProxy()
    try:
        (_connect_to_ranks if job.rank else _accept_ranks)(job, deadline, links, passage)
    except BaseException:
        for link in links.values():
            link.close()
        passage.close()
        raise
    _redirect_stdout()
    cache_on_every_rank()
    for link in links.values():
        link.wait(None)
    mute = listen_at(links[1 if job.rank == 0 else 0].host)
    # Before JAX waits for all ranks, so that the loss of one is noticed meanwhile.
    group = ProcessGroup(
        job.rank, job.size, links, no_collectives=mute, exit_callbacks=[passage.remove_at_exit]
    )
    try:
        _initialize(job, passage.service)
    except BaseException:
        group.abandon()
        raise
    set_current_group(group)
    return group


def _accept_ranks(
    job: JobConfig, deadline: float, links: dict[int, Link], passage: CoordinatorProxy
) -> None:
    """Rank 0: waits for all other ranks; sends them each other's and JAX's service's addresses."""
    addresses: dict[int, str] = {}
    turned = ""  # why a caller was turned away, which may explain a missing rank

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
        _accepting(listener) as callers,
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
            if not said.at:  # a caller of the coordinator proxy, which does not listen yet
                callers.reject(link, "it does not say where it waits")
            elif not (reason := _mismatch(job, said, links)):
                if said.process in links:  # it was restarted
                    links[said.process].close()
                links[said.process], addresses[said.process] = link, said.at
            elif has_key():
                raise refuse(reason, link)
            else:  # without a key anybody may call, and may not end the job
                turned = reason
                callers.reject(link, reason, told=True)
        proxy = listen(listener.getsockname()[0], 0)
        passage.lead(proxy, job.size)
    for rank, link in links.items():
        # This host's address as that rank sees it.
        service = format_address(link.host, proxy.getsockname()[1])
        before = {str(other): at for other, at in addresses.items() if other < rank}
        try:
            link.wait(_ANSWER)
            link.send({"service": service, "before": before})
        except LinkError:
            raise refuse(f"process {rank} at {link.where} ended before all had joined") from None


def _mismatch(job: JobConfig, said: Hello, links: dict[int, Link]) -> str:
    """Why a caller does not belong to the job; "": it does."""
    rank, size = said.process, said.processes
    if size != job.size:
        return f"process {rank} was told of {size} processes, and process 0 of {job.size}"
    if rank == 0 or (rank in links and not links[rank].ended):
        return f"two processes have the number {rank}; give each its own --process"
    for what, theirs in (("jinfer", said.jinfer), ("jax", said.jax)):
        if theirs != (here := _versions()[what]):
            return f"process {rank} has {what} {theirs}, and process 0 has {here}"
    return ""


def _connect_to_ranks(
    job: JobConfig, deadline: float, links: dict[int, Link], passage: CoordinatorProxy
) -> None:
    """Another rank: connects to rank 0 and to lower ranks, and waits for higher ones."""
    first = links[0] = _connect(job.host, job.port, deadline, "process 0")
    with listening(first.host, 0) as listener, _accepting(listener) as callers:
        at = format_address(*listener.getsockname()[:2])
        mine = Hello(job.rank, job.size, **_versions())
        told = _receive_welcome(first, replace(mine, at=at), deadline)
        for other, where in sorted(told.before.items()):
            link = _connect(*parse_address(where), deadline, f"process {other}")
            links[int(other)] = link
            with suppress(LinkError):  # the process group will notice the loss
                link.send(asdict(mine))
        while len(links) < job.size - 1:
            try:
                link, said = callers.next(deadline)
            except TimeoutError:
                missing = ", ".join(str(n) for n in range(job.size) if n not in {*links, job.rank})
                raise SourceError(f"process {missing} of {job.size} did not call in time") from None
            if said.processes != job.size or said.process in links or said.process <= job.rank:
                callers.reject(link, "it is not of this job")
            else:
                links[said.process] = link
    passage.call(parse_address(told.service), mine)


def _receive_welcome(first: Link, mine: Hello, deadline: float) -> Welcome:
    """Rank 0's answer, which comes when all ranks have called. Raises `SourceError`."""
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
def _accepting(listener: socket.socket) -> Iterator[IncomingConnections]:
    callers = IncomingConnections(listener)
    try:
        yield callers
    finally:
        callers.close()


def _join_seconds() -> float:
    given = os.environ.get(JOIN_SECONDS_VARIABLE, str(JOIN_SECONDS))
    try:
        return float(given)
    except ValueError:
        raise SourceError(
            f"{JOIN_SECONDS_VARIABLE}={given!r}: write seconds, such as {JOIN_SECONDS:g}"
        ) from None


def _versions() -> dict[str, str]:
    return {"jinfer": __version__, "jax": jax.__version__}


def _connect(host: str, port: int, deadline: float, who: str) -> Link:
    """Connects to a process that may not have started yet. Raises `SourceError`."""
    broken, where = 0, format_address(host, port)
    with task(f"waiting for {who} at {where}"):
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=_ANSWER)
                return authenticate(connection, called=True, seconds=_ANSWER)
            except LinkError as error:
                # A listener with many callers drops the oldest ones: try again.
                broken += 1
                if isinstance(error, StrangerError) or broken == _TRIES:
                    raise SourceError(f"{who} at {where}: {error}") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    reason = f"{who} cannot be reached at {where}: {error.strerror or error}"
                    raise SourceError(f"{reason}; see whether it runs, and --coordinator") from None
            time.sleep(_PAUSE)


def _redirect_stdout() -> None:
    """Redirects file descriptor 1 to stderr, since gloo prints to it; Python's stdout stays."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    os.dup2(2, 1)


def _initialize(job: JobConfig, service: str) -> None:
    """Starts JAX's distributed runtime. Raises `SourceError`."""
    # The preemption service would handle SIGTERM, which the server handles.
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
