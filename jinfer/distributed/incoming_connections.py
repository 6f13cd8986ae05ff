"""Incoming connections: accepts and authenticates callers concurrently.

A caller that is silent or does not know the job's key delays no other one.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from jinfer import progress
from jinfer.distributed.connection import Link, LinkError, authenticate, receive_hello, shut_down
from jinfer.distributed.message_schemas import Hello, format_address
from jinfer.loader.config.source_errors import SourceError

HELLO_SECONDS = 10.0  # seconds in which a caller has to authenticate and send its `Hello`
_MOST = 64  # unauthenticated callers at a time; the oldest is dropped for another one
_SAID = 20  # rejected callers that are reported
_LONGEST = 3600.0  # seconds of one wait
_AGAIN = 0.05  # seconds until another try, where file descriptors or threads are used up


class IncomingConnections:
    """Callers of a listening socket, each returned when it has authenticated and said `Hello`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._heard: SimpleQueue[tuple[Link, Hello]] = SimpleQueue()
        self._pending: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._turned = 0
        listener.setblocking(False)
        self._woken, self._wake = socket.socketpair()
        self._ready = selectors.DefaultSelector()
        for source in (listener, self._woken):
            self._ready.register(source, selectors.EVENT_READ)

    def next(self, deadline: float) -> tuple[Link, Hello]:
        """The next authenticated caller. Raises `TimeoutError`."""
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

    def reject(self, link: Link, reason: str, *, told: bool = False) -> None:
        """Closes a caller's connection, and prints why.

        Args:
            told: whether to send the reason to the caller.
        """
        if told:
            with suppress(LinkError):
                link.send({"refused": reason})
        link.close()
        self._say(link.where, reason)

    def close(self) -> None:
        """Closes the connections of all callers that `next` has not returned."""
        with self._lock:
            shut_down(*self._pending)
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
                shut_down(first)
            self._pending[connection] = None
        try:
            threading.Thread(target=self._known, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._done(connection)
            connection.close()
            raise

    def _known(self, connection: socket.socket) -> None:
        """Authenticates a caller, in a thread of its own."""
        where = _peer(connection)
        try:
            link = authenticate(connection, called=False, seconds=HELLO_SECONDS)
            try:
                said = receive_hello(link)
            except LinkError:
                link.close()
                raise
        except LinkError as error:
            if self._done(connection):
                self._say(where, str(error))
            return
        if self._done(connection):
            link.wait(HELLO_SECONDS)
            self._heard.put((link, said))
            with suppress(OSError):  # `close` was called meanwhile
                self._wake.send(b"1")
        else:
            link.close()

    def _done(self, connection: socket.socket) -> bool:
        """Removes a caller from those pending; whether it was not dropped before."""
        with self._lock:
            return self._pending.pop(connection, self) is None

    def _say(self, where: str, reason: str) -> None:
        with self._lock:
            self._turned += 1
            count = self._turned
        if count <= _SAID:
            more = "; of further ones nothing is said" if count == _SAID else ""
            progress.line(f"jinfer: a caller at {where} was turned away: {reason}{more}")


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at an address of this machine.

    At all addresses where the machine does not know this one as its own (behind NAT).

    Raises:
        SourceError: the port cannot be used.
    """
    try:
        listener = listen(host, port)
    except OSError as error:
        try:
            listener = listen("", port)
        except OSError:
            where = format_address(host, port)
            reason = f"process 0 cannot wait at {where}: {error.strerror}; is another job there?"
            raise SourceError(reason) from None
    with listener:
        yield listener


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `OSError`."""
    family, *_, where = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(where[:2], family=family, backlog=256)


def _peer(connection: socket.socket) -> str:
    try:
        return format_address(*connection.getpeername()[:2])
    except OSError:
        return "an unknown address"
