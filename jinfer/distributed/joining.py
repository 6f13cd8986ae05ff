"""Joining a job: every process finds all others, and then JAX is told.

What is wrong shows here, as one line for each: JAX itself would end the process with a dump.
Process 0 waits at the job's address. The others tell it who they are and where they listen, and
are told of one another; JAX's own service then gets a port that is free.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from jinfer.distributed.group import Group, become
from jinfer.distributed.job import Job
from jinfer.distributed.keeping import keep_programs
from jinfer.distributed.link import Link, LinkError, hello, known
from jinfer.opening.sources import SourceError
from jinfer.version import __version__

PATIENCE = "JINFER_JOIN_SECONDS"  # of the environment: that the others may take to start
SECONDS = 300.0  # where it says nothing
_PAUSE, _ANSWER = 0.25, 20.0  # seconds between two calls, and for an answer


def join(job: Job) -> Group:
    """Joins a job, of which this process is from now on; to be called before JAX computes.

    Raises:
        SourceError: somebody cannot be reached, or is not of this job.
    """
    deadline = time.monotonic() + _patience()
    links: dict[int, Link] = {}
    try:
        service = (_call if job.rank else _lead)(job, deadline, links)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    _aside()
    same = len({link.host for link in links.values()}) == 1
    keep_programs()
    _initialize(job, service, service if same else f"[::]:{service.rpartition(':')[2]}")
    for link in links.values():
        link.wait(None)
    group = Group(job.rank, job.size, links)
    become(group)
    return group


def _lead(job: Job, deadline: float, links: dict[int, Link]) -> str:
    """Process 0: waits for all others; tells them of one another, and where JAX's service is."""
    heard: dict[int, str] = {}

    def refuse(reason: str, *more: Link) -> SourceError:
        for link in (*links.values(), *more):
            with suppress(LinkError):
                link.send({"refused": reason})
        for link in more:
            link.close()
        return SourceError(reason)

    with _listener(job.host, job.port) as listener:
        while len(links) < job.size - 1:
            try:
                link, said = _accepted(listener, deadline)
            except TimeoutError:
                missing = [str(n) for n in range(1, job.size) if n not in links]
                named = f"process{'es' * (len(missing) > 1)} {', '.join(missing)} of {job.size}"
                raise refuse(f"{named} did not join in time; see whether they run") from None
            except LinkError as error:
                print(f"jinfer: a caller was turned away: {error}", file=sys.stderr)
                continue
            if reason := _wrong(job, said, links):
                raise refuse(reason, link)
            links[said["process"]], heard[said["process"]] = link, said["at"]
        port = _free_port(listener.getsockname()[0])
    for rank, link in links.items():
        # Seen from there: this host's address, and the others'.
        service = _address(link.host, port)
        before = {str(other): at for other, at in heard.items() if other < rank}
        link.send({"service": service, "before": before})
    return _address(links[1].host, port)


def _wrong(job: Job, said: Any, links: dict[int, Link]) -> str:
    """What is wrong with a process; "": nothing."""
    rank, size = said["process"], said["processes"]
    if size != job.size:
        return f"process {rank} was told of {size} processes, and process 0 of {job.size}"
    if rank in links or rank == 0:
        return f"two processes have the number {rank}; give each its own --process"
    for what in ("jinfer", "jax"):
        if said[what] != (here := _versions()[what]):
            return f"process {rank} has {what} {said[what]}, and process 0 has {here}"
    return ""


def _call(job: Job, deadline: float, links: dict[int, Link]) -> str:
    """Another process: calls process 0, and those with numbers between; as `_lead`."""
    first = links[0] = _reached(job.host, job.port, deadline, "process 0")
    with _listener(first.host, 0) as listener:
        at = _address(*listener.getsockname()[:2])
        mine = {"process": job.rank, "processes": job.size, **_versions()}
        try:
            first.send({**mine, "at": at})
            first.wait(max(1.0, deadline - time.monotonic()) + _ANSWER)
            told = first.receive()
        except LinkError:
            raise SourceError("process 0 ended before all had joined; see what it says") from None
        if "refused" in told:
            raise SourceError(told["refused"])
        for other, where in sorted(told["before"].items()):
            host, _, port = where.rpartition(":")
            link = _reached(host.strip("[]"), int(port), deadline, f"process {other}")
            link.send(mine)
            links[int(other)] = link
        while len(links) < job.size - 1:
            try:
                link, said = _accepted(listener, deadline)
            except (TimeoutError, LinkError) as error:
                raise SourceError(f"a process did not call: {error}") from None
            links[said["process"]] = link
    return str(told["service"])


def _patience() -> float:
    given = os.environ.get(PATIENCE, str(SECONDS))
    try:
        return float(given)
    except ValueError:
        raise SourceError(f"{PATIENCE}={given!r}: write seconds, such as {SECONDS:g}") from None


def _versions() -> dict[str, str]:
    return {"jinfer": __version__, "jax": jax.__version__}


def _reached(host: str, port: int, deadline: float, who: str) -> Link:
    """A link to a process that may yet have to start."""
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_ANSWER)
            return known(connection, called=True, seconds=_ANSWER)
        except LinkError as error:
            reason = f"{who} at {_address(host, port)}: {error}"
            raise SourceError(reason) from None
        except OSError as error:
            if time.monotonic() > deadline:
                reason = (
                    f"{who} cannot be reached at {_address(host, port)}: {error.strerror or error}"
                )
                raise SourceError(f"{reason}; see whether it runs, and --coordinator") from None
            time.sleep(_PAUSE)


def _accepted(listener: socket.socket, deadline: float) -> tuple[Link, Any]:
    """Whoever calls next, and what it says. Raises `TimeoutError`, `LinkError`."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    connection, _ = listener.accept()
    link = known(connection, called=False, seconds=_ANSWER)
    try:
        said = hello(link)
    except LinkError:
        link.close()
        raise
    if not isinstance(said, dict) or type(said.get("process")) is not int:
        link.close()
        raise LinkError("a caller did not say who it is")
    return link, said


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at an address of this machine; at all, where it goes by another one."""
    try:
        listener = _listening(host, port)
    except OSError as error:
        try:
            listener = _listening("", port)
        except OSError:
            where = _address(host, port)
            reason = f"process 0 cannot wait at {where}: {error.strerror}; is another job there?"
            raise SourceError(reason) from None
    with listener:
        yield listener


def _listening(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(found[4][:2], family=found[0], backlog=256)


def _free_port(host: str) -> int:
    with _listening(host, 0) as listener:
        return int(listener.getsockname()[1])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _aside() -> None:
    """What gloo prints must not be taken for an answer: from here on only Python's own is one."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    os.dup2(2, 1)


def _initialize(job: Job, service: str, bound: str) -> None:
    """Tells JAX. Raises `SourceError`."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, which is the server's.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            service,
            job.size,
            job.rank,
            local_device_ids=job.devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bound,
            shutdown_timeout_seconds=10,
        )
    except RuntimeError as error:
        raise SourceError(f"JAX cannot join the job: {' '.join(str(error).split())}") from None
