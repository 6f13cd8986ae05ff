"""Whoever calls a process, heard side by side: a stranger keeps nobody waiting."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from jinfer import progress
from jinfer.distributed.connection import Link, LinkError, hello, known
from jinfer.distributed.message_schemas import Hello
from jinfer.opening.sources import SourceError

HEARD = 10.0  # seconds in which a caller has to show that it belongs to the job, and say who it is
_MOST = 64  # callers that are heard at a time; of more the first has to go
_SAID = 20  # strangers of whom there is a line
_LONGEST = 3600.0  # seconds of one wait
_AGAIN = 0.05  # seconds until another try, where the system has no handle or thread free


class Callers:
    """The processes that call, as soon as each has said who it is."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._heard: SimpleQueue[tuple[Link, Hello]] = SimpleQueue()
        self._pending: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._turned = 0
        listener.setblocking(False)
        self._woken, self._wake = socket.socketpair()
        self._ready = selectors.DefaultSelector()
        for each in (listener, self._woken):
            self._ready.register(each, selectors.EVENT_READ)

    def next(self, deadline: float) -> tuple[Link, Hello]:
        """Whoever has said who it is next. Raises `TimeoutError`."""
        while True:
            with suppress(Empty):
                return self._heard.get_nowait()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in self._ready.select(min(left, _LONGEST)):
                if key.fileobj is self._woken:
                    self._woken.recv(64)
                    continue
                try:
                    self._hear(self._listener.accept()[0])
                except (OSError, RuntimeError):
                    time.sleep(_AGAIN)

    def turn_away(self, link: Link, reason: str, *, told: bool = False) -> None:
        """Ends a caller's connection, with a line here.

        Args:
            told: whether the caller hears why.
        """
        if told:
            with suppress(LinkError):
                link.send({"refused": reason})
        link.close()
        self._say(link.where, reason)

    def close(self) -> None:
        """Ends the connections of all who have not said who they are."""
        with self._lock:
            for connection in self._pending:
                _end(connection)
            self._pending.clear()
        with suppress(Empty):
            while True:
                self._heard.get_nowait()[0].close()
        self._ready.close()
        self._woken.close()
        self._wake.close()

    def _hear(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._pending) >= _MOST:
                first = next(iter(self._pending))
                del self._pending[first]
                _end(first)
            self._pending[connection] = None
        try:
            threading.Thread(target=self._known, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._done(connection)
            connection.close()
            raise

    def _known(self, connection: socket.socket) -> None:
        """A caller's own thread."""
        where = _shown(connection)
        try:
            link = known(connection, called=False, seconds=HEARD)
            try:
                said = hello(link)
            except LinkError:
                link.close()
                raise
        except LinkError as error:
            if self._done(connection):
                self._say(where, str(error))
            return
        if self._done(connection):
            link.wait(HEARD)
            self._heard.put((link, said))
            with suppress(OSError):  # nobody waits any more
                self._wake.send(b"1")
        else:
            link.close()

    def _done(self, connection: socket.socket) -> bool:
        """A caller has been heard; whether anybody still wants to know."""
        with self._lock:
            return self._pending.pop(connection, self) is None

    def _say(self, where: str, reason: str) -> None:
        with self._lock:
            self._turned += 1
            count = self._turned
        if count <= _SAID:
            more = "; of further ones nothing is said" if count == _SAID else ""
            progress.line(f"jinfer: a caller at {where} was turned away: {reason}{more}")


def address(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at an address of this machine; at all, where it goes by another one.

    Raises:
        SourceError: nobody can.
    """
    try:
        listener = listen(host, port)
    except OSError as error:
        try:
            listener = listen("", port)
        except OSError:
            where = address(host, port)
            reason = f"process 0 cannot wait at {where}: {error.strerror}; is another job there?"
            raise SourceError(reason) from None
    with listener:
        yield listener


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `OSError`."""
    found = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(found[4][:2], family=found[0], backlog=256)


def _end(connection: socket.socket) -> None:
    """Ends a connection for whoever reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _shown(connection: socket.socket) -> str:
    try:
        return address(*connection.getpeername()[:2])
    except OSError:
        return "an unknown address"
