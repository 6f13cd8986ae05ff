"""Coordinator proxy: authenticated access to JAX's coordination service.

JAX's service does not authenticate its clients, so it listens only on a Unix socket in a folder of
this user's. Rank 0 accepts connections on a port, and forwards those of callers that know the
job's key to that socket. On the other ranks JAX's client connects to a local Unix socket too, from
which its connections are forwarded to rank 0.
"""

from __future__ import annotations

import atexit
import fcntl
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinfer.distributed.connection import authenticate, shut_down
from jinfer.distributed.incoming_connections import HELLO_SECONDS, IncomingConnections
from jinfer.distributed.message_schemas import Hello

_NAME, _LOCK = "jinfer-job-", "lock"  # prefix of folder names, and the lock file in each
_NEW = 60.0  # seconds during which a new folder is not removed
_LONGEST = 100  # bytes of a Unix socket's path; few systems allow many more
_PIECE = 1 << 16
_STARTING = 60.0  # seconds until JAX's service listens
_AGAIN = 0.05
# Seconds by which the loss of the service is hidden from JAX's client, which would abort the
# process with a stack dump; by then the process has ended with a line of its own.
_HELD = 15.0


class CoordinatorProxy:
    """This process's end of the proxy.

    Attributes:
        path: the Unix socket.
        service: its address as JAX writes it.
    """

    def __init__(self) -> None:
        where = tempfile.gettempdir()
        if len(where.encode()) > _LONGEST - len(f"/{_NAME}01234567/jax"):
            where = "/tmp"
        _remove_stale_folders(Path(where))
        self._folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=where))
        self._lock = (self._folder / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # for as long as this process lives
        self.path = str(self._folder / "jax")
        self.service = f"unix:{self.path}"
        atexit.register(self.close)

    def lead(self, listener: socket.socket, size: int) -> None:
        """Rank 0: forwards authenticated connections to the service. Takes over the listener."""
        callers = IncomingConnections(listener)

        def serve() -> None:
            while True:
                link, said = callers.next(math.inf)
                if said.processes != size:
                    callers.reject(link, "it is not of this job")
                    continue
                _in_thread(_forward_to_service, link.socket(), self.path)

        _in_thread(serve)

    def call(self, where: tuple[str, int], mine: Hello) -> None:
        """Another rank: forwards the connections of JAX's client to rank 0."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:  # out of file descriptors
                    time.sleep(_AGAIN)
                    continue
                _in_thread(_forward_to_rank0, client, where, mine)

        _in_thread(serve)

    def remove_at_exit(self, reason: str) -> None:
        """Removes the socket of a process that ends at once.

        One that is not there yet may be about to be bound by JAX in another thread, which crashes
        where its folder has gone: that folder is removed by the next job
        (`_remove_stale_folders`).
        """
        if os.path.exists(self.path):
            self.close()

    def close(self) -> None:
        """Removes the socket; open connections stay."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _remove_stale_folders(where: Path) -> None:
    """Removes the folders that killed processes have left behind."""
    for folder in where.glob(f"{_NAME}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _NEW:
                continue  # another user's, or possibly not locked yet
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _forward_to_service(connection: socket.socket, path: str) -> None:
    """Forwards a connection to JAX's service, which may not have started yet."""
    deadline = time.monotonic() + _STARTING
    with connection, socket.socket(socket.AF_UNIX) as service:
        while True:
            try:
                service.connect(path)
                break
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_AGAIN)
        _forward_both_ways(connection, service)


def _forward_to_rank0(own: socket.socket, where: tuple[str, int], mine: Hello) -> None:
    """Forwards a connection of this process's JAX client to rank 0."""
    with own:
        try:
            link = authenticate(
                socket.create_connection(where, timeout=HELLO_SECONDS),
                called=True,
                seconds=HELLO_SECONDS,
            )
            link.send(asdict(mine))
        except OSError:
            time.sleep(_HELD)
            return
        with link.socket() as far:
            back = threading.Thread(target=_forward, args=(own, far), daemon=True)
            back.start()
            _forward(far, own, told=False)
            back.join(_HELD)
            shut_down(own, far)


def _forward_both_ways(one: socket.socket, other: socket.socket) -> None:
    """Forwards in both directions until one side ends."""
    _in_thread(_forward, one, other)
    _forward(other, one)
    shut_down(one, other)


def _forward(source: socket.socket, target: socket.socket, *, told: bool = True) -> None:
    """Forwards in one direction until one side ends.

    Args:
        told: whether to shut down the target's sending side then.
    """
    with suppress(OSError):
        while content := source.recv(_PIECE):
            target.sendall(content)
    if told:
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _in_thread(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, name="passage", daemon=True).start()
