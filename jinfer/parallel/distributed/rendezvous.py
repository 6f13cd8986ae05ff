"""Rendezvous: all processes of a job call process 0, before JAX's distributed runtime starts.

JAX would abort a process that cannot join. So it is checked before whether all are there, have the
same versions and know the job's key, by the challenges of `multiprocessing.connection`. Errors are
one line.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any

import jax

from jinfer.loader.config.source_errors import SourceError
from jinfer.parallel.distributed.job_config import JobConfig
from jinfer.progress import task
from jinfer.version import __version__

KEY = "JINFER_JOB_KEY"  # environment variable: the secret of the job's processes
# Environment variable: how long the other processes may take to start; and its default.
JOIN_SECONDS_VARIABLE, JOIN_SECONDS = "JINFER_JOIN_SECONDS", 300.0
_NO_KEY = b"jinfer"
_PAUSE, _ANSWER = 0.25, 20.0  # seconds between connection attempts, and for an answer
_LONGEST = 4096  # bytes of a message
_CALLERS = 64  # connections at a time that have not proved that they know the key


@dataclass(frozen=True)
class Joined:
    """What a process knows after the rendezvous.

    Attributes:
        service: address of JAX's coordination service.
        addresses: of each process.
        connections: from process 0 to the others, or to it.
    """

    service: str
    addresses: tuple[str, ...]
    connections: Mapping[int, Connection]


def job_key() -> bytes:
    """The job's secret; that of all jobs without one."""
    return os.environ.get(KEY, "").encode() or _NO_KEY


def rendezvous(job: JobConfig) -> Joined:
    """Waits until all processes of a job are there.

    Raises:
        SourceError: a process is missing, or does not belong to the job.
    """
    deadline = time.monotonic() + _join_seconds()
    return _join(job, deadline) if job.rank else _accept(job, deadline)


def _accept(job: JobConfig, deadline: float) -> Joined:
    callers = SimpleQueue[tuple[Any, str, str, Any]]()
    members: dict[int, tuple[Connection, str, str]] = {}
    reason = ""  # why a caller was turned away, which may explain who is missing

    def missing() -> str:
        left = [str(rank) for rank in range(1, job.size) if rank not in members]
        return f"process{'es' * (len(left) > 1)} {', '.join(left)} of {job.size}"

    try:
        listener = socket.create_server((job.host, job.port), family=_family(job.host))
    except OSError as error:
        where = format_address(job.host, job.port)
        raise SourceError(f"cannot listen at {where}: {error.strerror or error}") from None
    with _listening(listener), task(f"waiting for {missing()}") as waiting:
        threading.Thread(target=_accept_callers, args=(listener, callers), daemon=True).start()
        while len(members) < job.size - 1:
            waiting.say(f"waiting for {missing()}")
            try:
                caller, own, where, hello = callers.get(timeout=max(0, deadline - time.monotonic()))
            except Empty:
                more = f" ({reason})" if reason else ""
                text = f"{missing()} did not join in time; see whether they run{more}"
                raise _refused(text, members) from None
            if isinstance(hello, str):
                reason = hello
                continue
            refusal = _mismatch(job, hello, members)
            if not refusal:
                members[hello["process"]] = caller, own, where
                continue
            _answer(caller, {"refused": refusal})
            caller.close()
            reason = refusal
            if os.environ.get(KEY):  # without a key anybody may call, and may not end the job
                raise _refused(refusal, members)
    here = next(own for _, own, _ in members.values())
    with socket.create_server((here, 0), family=_family(here)) as free:
        service = format_address(here, free.getsockname()[1])
    addresses = [here, *(members[rank][2] for rank in range(1, job.size))]
    for caller, _, _ in members.values():
        _answer(caller, {"service": service, "addresses": addresses})
    return Joined(service, tuple(addresses), {n: caller for n, (caller, _, _) in members.items()})


@contextmanager
def _listening(listener: socket.socket) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        listener.close()


def _accept_callers(listener: socket.socket, callers: SimpleQueue[Any]) -> None:
    """Accepts connections until the listener is closed; a thread authenticates each."""
    waiting: dict[int, socket.socket] = {}
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            break
        if len(waiting) >= _CALLERS:
            _disconnect(waiting, next(iter(list(waiting)), None))
        waiting[id(caller)] = caller
        threading.Thread(target=_authenticate, args=(caller, waiting, callers), daemon=True).start()


def _disconnect(waiting: dict[int, socket.socket], longest: int | None) -> None:
    """Ends the connection that has waited longest, and with it the thread that reads it."""
    if longest is not None and (caller := waiting.pop(longest, None)) is not None:
        with suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)


def _authenticate(
    caller: socket.socket, waiting: dict[int, socket.socket], callers: SimpleQueue[Any]
) -> None:
    connection: Connection | None = None
    where = ""
    try:
        own, where = caller.getsockname()[0], caller.getpeername()[0]
        connection = _connection(caller)
        deliver_challenge(connection, job_key())
        answer_challenge(connection, job_key())
        hello = json.loads(connection.recv_bytes(_LONGEST))
        if type(hello["process"]) is int and type(hello["processes"]) is int:
            callers.put((connection, own, where, hello))
            connection = None
    except AuthenticationError:
        callers.put((None, "", where, f"a caller at {where} has another {KEY}"))
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        pass  # not a process of a job
    finally:
        waiting.pop(id(caller), None)
        caller.close()
        if connection is not None:
            connection.close()


def _connection(caller: socket.socket) -> Connection:
    """A connection over a copy of a socket; a read of it fails after `_ANSWER` seconds."""
    caller.settimeout(None)
    seconds = struct.pack("ll", int(_ANSWER), 0)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    return Connection(os.dup(caller.fileno()))


def _mismatch(job: JobConfig, hello: Mapping[str, Any], members: Mapping[int, Any]) -> str:
    """Why a caller does not belong to the job; "": it does."""
    rank, size = hello["process"], hello["processes"]
    if size != job.size:
        return f"process {rank} was started with --processes {size}, and process 0 with {job.size}"
    if not 0 < rank < size or rank in members:
        return f"two processes have the number {rank}; give each its own --process"
    for name, version in _versions().items():
        if hello.get(name) != version:
            return f"process {rank} has {name} {hello.get(name)}, and process 0 has {version}"
    return ""


def _refused(reason: str, members: Mapping[int, tuple[Connection, str, str]]) -> SourceError:
    for caller, _, _ in members.values():
        _answer(caller, {"refused": reason})
        caller.close()
    return SourceError(reason)


def _answer(caller: Connection, answer: Mapping[str, Any]) -> None:
    with suppress(OSError):
        caller.send_bytes(json.dumps(answer).encode())


def _join(job: JobConfig, deadline: float) -> Joined:
    who = f"process 0 at {format_address(job.host, job.port)}"
    connection = _connected(job, deadline, who)
    hello = {"process": job.rank, "processes": job.size, **_versions()}
    connection.send_bytes(json.dumps(hello).encode())
    try:
        with task("waiting for the other processes"):
            if not connection.poll(max(1.0, deadline - time.monotonic()) + _ANSWER):
                raise SourceError(f"{who} does not answer; see what it reports")
            answer = json.loads(connection.recv_bytes())
    except (OSError, EOFError):
        raise SourceError(f"{who} ended before all had joined; see what it reports") from None
    if "refused" in answer:
        raise SourceError(answer["refused"])
    return Joined(answer["service"], tuple(answer["addresses"]), {0: connection})


def _connected(job: JobConfig, deadline: float, who: str) -> Connection:
    """A connection to process 0, which may not have started yet."""
    with task(f"waiting for {who}"):
        while True:
            try:
                connection = _connect(job)
                answer_challenge(connection, job_key())
                deliver_challenge(connection, job_key())
                return connection
            except AuthenticationError:
                raise SourceError(
                    f"{who} has another {KEY}; set the same for all processes"
                ) from None
            except (OSError, EOFError, ValueError) as error:
                if isinstance(error, BlockingIOError):
                    error = TimeoutError("it does not answer")
                if time.monotonic() > deadline:
                    text = getattr(error, "strerror", None) or str(error) or "it hung up"
                    reason = f"{who} cannot be reached: {text}"
                    raise SourceError(f"{reason}; see whether it runs, and --coordinator") from None
            time.sleep(_PAUSE)


def _connect(job: JobConfig) -> Connection:
    with socket.create_connection((job.host, job.port), timeout=_ANSWER) as caller:
        return _connection(caller)


def format_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _versions() -> dict[str, str]:
    return {"jinfer": __version__, "jax": jax.__version__}


def _join_seconds() -> float:
    given = os.environ.get(JOIN_SECONDS_VARIABLE, str(JOIN_SECONDS))
    try:
        return float(given)
    except ValueError:
        raise SourceError(
            f"{JOIN_SECONDS_VARIABLE}={given!r}: write seconds, such as {JOIN_SECONDS:g}"
        ) from None
