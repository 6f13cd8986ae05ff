"""The way to JAX's service, which believes whoever reaches it: only processes of the job do.

The service listens at a Unix socket in a folder of this user's. Process 0 waits for the others at a
port, and connects each that has shown that it knows the key with the service. JAX's clients in the
others find such a socket too, behind which each of their connections is brought there.
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

from jinfer.distributed.connection import known
from jinfer.distributed.incoming_connections import HEARD, Callers
from jinfer.distributed.message_schemas import Hello

_NAME, _LOCK = "jinfer-job-", "lock"  # of folders, and of a file in each
_NEW = 60.0  # seconds in which a folder is let be
_LONGEST = 100  # bytes of a Unix socket's path; few systems allow many more
_PIECE = 1 << 16
_STARTING = 60.0  # seconds until JAX's service listens
_AGAIN = 0.05
# Seconds that JAX's client does not hear that its service is gone: it would end the process with a
# dump, and the process says a line and ends before.
_HELD = 15.0


class Passage:
    """This process's end of the way.

    Attributes:
        service: JAX's name of where its service is.
    """

    def __init__(self) -> None:
        where = tempfile.gettempdir()
        if len(where.encode()) > _LONGEST - len(f"/{_NAME}01234567/jax"):
            where = "/tmp"
        _clear(Path(where))
        self._folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=where))
        self._lock = (self._folder / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # for as long as this process lives
        self.path = str(self._folder / "jax")
        self.service = f"unix:{self.path}"
        atexit.register(self.close)

    def lead(self, listener: socket.socket, size: int) -> None:
        """Process 0: brings whoever belongs to the job to the service. Takes the listener."""
        callers = Callers(listener)

        def serve() -> None:
            while True:
                link, said = callers.next(math.inf)
                if said.processes != size:
                    callers.turn_away(link, "it is not of this job")
                    continue
                _beside(_to_service, link.socket(), self.path)

        _beside(serve)

    def call(self, where: tuple[str, int], mine: Hello) -> None:
        """Another process: brings JAX's client here to process 0."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    own, _ = listener.accept()
                except OSError:  # no handle is free
                    time.sleep(_AGAIN)
                    continue
                _beside(_to_passage, own, where, mine)

        _beside(serve)

    def farewell(self, reason: str) -> None:
        """Removes the socket of a process that ends at once.

        One that is not there yet may be about to be bound by JAX in another thread, which crashes
        where its folder has gone: that folder is removed by the next job, see `_clear`.
        """
        if os.path.exists(self.path):
            self.close()

    def close(self) -> None:
        """Removes the socket; connections stay."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _clear(where: Path) -> None:
    """Removes the folders of processes that ended without a chance to do so."""
    for folder in where.glob(f"{_NAME}*"):
        with suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _NEW:
                continue  # another user's, or it may not be locked yet
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _to_service(connection: socket.socket, path: str) -> None:
    """Brings a process's connection to JAX's service, which may yet have to start."""
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
        _joined(connection, service)


def _to_passage(own: socket.socket, where: tuple[str, int], mine: Hello) -> None:
    """Brings a connection of JAX's client here to process 0."""
    with own:
        try:
            link = known(socket.create_connection(where, timeout=HEARD), called=True, seconds=HEARD)
            link.send(asdict(mine))
        except OSError:
            time.sleep(_HELD)
            return
        with link.socket() as far:
            back = threading.Thread(target=_copied, args=(own, far), daemon=True)
            back.start()
            _copied(far, own, told=False)
            back.join(_HELD)
            _end(own, far)


def _joined(one: socket.socket, other: socket.socket) -> None:
    """What comes from the one goes to the other, until one of them ends."""
    _beside(_copied, one, other)
    _copied(other, one)
    _end(one, other)


def _copied(source: socket.socket, target: socket.socket, *, told: bool = True) -> None:
    """Sends what comes to another connection, until one of them ends.

    Args:
        told: whether the other one hears of the end.
    """
    with suppress(OSError):
        while content := source.recv(_PIECE):
            target.sendall(content)
    if told:
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _end(*connections: socket.socket) -> None:
    """Ends connections that other threads may wait for, which would keep them open."""
    for each in connections:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _beside(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, name="passage", daemon=True).start()
