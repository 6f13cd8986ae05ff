"""Clients that hold connections: idle, with slow heads, with slow bodies, or without reading.

`python -m tests.server.attackers PORT KIND COUNT ADDRESSES` opens COUNT connections from each of
ADDRESSES, and opens another for each that the server closes, until its standard input ends. It
prints how many it has opened, how many were closed, and how many could not be opened.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_HEAD = b"GET /health HTTP/1.1\r\nhost: a\r\nx: "
_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
# Each asks for more than the kernel's buffers hold.
_UNREAD = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n" * 60
# What a connection sends first, and then once a second.
KINDS = {
    "idle": (b"", b""),
    "heads": (_HEAD, b"a"),
    "bodies": (_BODY, b" "),
    "large_bodies": (_BODY + b" " * 60_000, b" " * 60_000),
    "unread": (_UNREAD, b""),
}
_PARALLEL = 64  # connections that are being opened at a time
_EVERY = 1.0  # seconds from one piece to the next


@dataclass
class Attackers:
    """Connections from some addresses.

    Attributes:
        server: host and port.
        first, rest: what each sends first, and then once a second.
        wanted: sources of connections that are to be opened.
        since: when each open connection has last sent something.
        counts: opened, closed and failed connections.
    """

    server: tuple[str, int]
    first: bytes
    rest: bytes
    wanted: deque[str]
    since: dict[socket.socket, float] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: {"opened": 0, "closed": 0, "failed": 0, "most": 0}
    )

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sources = dict[socket.socket, str]()
        self._opening = set[socket.socket]()

    def run(self) -> None:
        """Goes on until standard input ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            while self.wanted and len(self._opening) < _PARALLEL:
                self._open(self.wanted.popleft())
            for key, events in self._selector.select(0.05):
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj, events)
            self._send_rest(time.monotonic() - _EVERY)

    def _open(self, source: str) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source != "127.0.0.1":
            connection.setsockopt(
                socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1
            )
            connection.bind((source, 0))
        self._sources[connection] = source
        self._opening.add(connection)
        connection.connect_ex(self.server)
        self._selector.register(connection, selectors.EVENT_WRITE)

    def _serve(self, connection: socket.socket, events: int) -> None:
        if connection in self._opening:
            self._opening.discard(connection)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._drop(connection, "failed")
                return
            self.counts["opened"] += 1
            self._send(connection, self.first)
            if connection in self._sources:
                # Who does not read learns only from the next piece that a connection was closed.
                self._selector.modify(connection, selectors.EVENT_READ)
                if self.first is _UNREAD:
                    self._selector.unregister(connection)
                self.since[connection] = time.monotonic()
                self.counts["most"] = max(self.counts["most"], len(self.since))
            return
        try:
            if connection.recv(4096):
                return
        except OSError:
            pass
        self._drop(connection, "closed")

    def _send(self, connection: socket.socket, piece: bytes) -> None:
        try:
            connection.send(piece)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection, "closed")

    def _send_rest(self, before: float) -> None:
        while self.since:  # the first has waited longest
            connection, sent = next(iter(self.since.items()))
            if sent > before:
                return
            del self.since[connection]
            self.since[connection] = time.monotonic()
            if self.first is _UNREAD:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._drop(connection, "closed")
            elif self.rest:
                self._send(connection, self.rest)

    def _drop(self, connection: socket.socket, why: str) -> None:
        self.counts[why] += 1
        self.since.pop(connection, None)
        self.wanted.append(self._sources.pop(connection))
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()


def main() -> None:
    """Runs until standard input ends."""
    port, kind, count, addresses = sys.argv[1:]
    number = int(addresses)
    sources = ["127.0.0.1"] if number == 1 else [f"127.0.1.{1 + i}" for i in range(number)]
    attackers = Attackers(("127.0.0.1", int(port)), *KINDS[kind], deque(sources * int(count)))
    print("begun", flush=True)
    attackers.run()
    print(attackers.counts, flush=True)


if __name__ == "__main__":
    main()
