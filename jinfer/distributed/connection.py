"""Connections between ranks, with mutual authentication by the job's key.

Both sides prove by HMAC-SHA256 over exchanged nonces that they know the key, before any message is
read. Without a key (`JINFER_JOB_KEY`) the network has to be private.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from jinfer.distributed.message_schemas import Hello, format_address, read_hello
from jinfer.distributed.wire_format import HEAD, FrameError, deserialize, parse_header, serialize

KEY = "JINFER_JOB_KEY"  # environment variable
_MAGIC = b"jinfer 1"
_NONCE = 32
_HELLO = 1 << 16  # bytes of the first message, at most
# TCP keepalive, since a host that is gone sends nothing: probes after 5 s of silence, loss 15 s
# later.
_SILENT, _BETWEEN, _ASKED = 5, 5, 3


class LinkError(ConnectionError):
    """A connection ended, or could not be made."""


class StrangerError(LinkError):
    """The other end does not belong to the job, so that another attempt is useless."""


class MessageError(LinkError):
    """A received message cannot be read."""


class Link:
    """A connection to another process. Several threads may send, one may receive.

    Attributes:
        where: the other end's HOST:PORT, for messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._until: float | None = None
        self.where = format_address(*connection.getpeername()[:2])
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _SILENT),
            ("TCP_KEEPINTVL", _BETWEEN),
            ("TCP_KEEPCNT", _ASKED),
            ("TCP_USER_TIMEOUT", 1000 * (_SILENT + _BETWEEN * _ASKED)),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def host(self) -> str:
        """This end's address, at which other ranks reach this process too."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Any) -> None:
        """Sends a message. Raises `LinkError`."""
        content = serialize(message)
        try:
            with self._lock:
                self._socket.sendall(content)
        except OSError as error:
            raise LinkError(str(error)) from None

    def receive(self, most: int | None = None) -> Any:
        """The next message; waits for it.

        Args:
            most: the largest size in bytes that is accepted.

        Raises:
            LinkError: the connection has ended.
            MessageError: the message cannot be read.
        """
        try:
            text, data = parse_header(bytes(self._exactly(HEAD)))
            if most is not None and text + data > most:
                raise FrameError(f"a message of {text + data} bytes")
            return deserialize(bytes(self._exactly(text)), memoryview(self._exactly(data)))
        except FrameError as error:
            raise MessageError(str(error)) from None

    def wait(self, seconds: float | None) -> None:
        """Sets a deadline for all that is received from now on, and a timeout for each send.

        None removes them.
        """
        self._until = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    @property
    def ended(self) -> bool:
        """Whether the other end has closed the connection, checked without waiting."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            if not ready.select(0):
                return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Closes the connection, which also wakes a thread that receives."""
        shut_down(self._socket)
        self._socket.close()

    def socket(self) -> socket.socket:
        """The socket itself, for another protocol."""
        self.wait(None)
        return self._socket

    def _exactly(self, count: int) -> bytearray:
        buffer, at = bytearray(count), 0
        view = memoryview(buffer)
        while at < count:
            try:
                if self._until is not None:
                    self._socket.settimeout(max(0.001, self._until - time.monotonic()))
                size = self._socket.recv_into(view[at:])
            except OSError as error:
                raise LinkError(str(error)) from None
            if not size:
                raise LinkError("the connection was closed")
            at += size
        return buffer


def shut_down(*connections: socket.socket) -> None:
    """Shuts connections down, which also wakes threads that wait for them."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def has_key() -> bool:
    """Whether there is a key, so that only processes of the job can connect."""
    return bool(_key())


def authenticate(connection: socket.socket, *, called: bool, seconds: float) -> Link:
    """A link, after both ends have proved that they know the key.

    Args:
        called: whether this end made the connection.
        seconds: time limit for this and for the first message.

    Raises:
        StrangerError: the other end does not know the key, or speaks another protocol.
        LinkError: the connection ended.
    """
    try:
        link = Link(connection)
    except OSError as error:  # the connection has ended already
        connection.close()
        raise LinkError(str(error)) from None
    link.wait(seconds)
    nonce = secrets.token_bytes(_NONCE)
    try:
        connection.sendall(_MAGIC + nonce)
        theirs = bytes(link._exactly(len(_MAGIC) + _NONCE))
        if not theirs.startswith(_MAGIC):
            raise StrangerError("something else than jinfer answers there")
        other = theirs[len(_MAGIC) :]
        connection.sendall(_proof(called, nonce, other))
        proof = bytes(link._exactly(hashlib.sha256().digest_size))
    except LinkError:
        link.close()
        raise
    except OSError as error:
        link.close()
        raise LinkError(str(error)) from None
    if not hmac.compare_digest(proof, _proof(not called, other, nonce)):
        link.close()
        raise StrangerError(f"the other process has another {KEY}")
    return link


def receive_hello(link: Link) -> Hello:
    """Receives a caller's `Hello`. Raises `LinkError`."""
    try:
        return read_hello(link.receive(_HELLO))
    except FrameError as error:
        raise MessageError(str(error)) from None


def _proof(called: bool, own: bytes, other: bytes) -> bytes:
    return hmac.digest(_key(), b"ca"[called : called + 1] + own + other, "sha256")


def _key() -> bytes:
    return os.environ.get(KEY, "").encode()
