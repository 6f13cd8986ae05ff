"""A connection of two processes, and how each shows that it belongs to the job.

Whoever connects proves that it knows the job's key, and has the other side prove the same, before
anything else is read. Without a key the network has to be the job's own.
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

from jinfer.distributed.message_schemas import Hello, read_hello
from jinfer.distributed.wire_format import HEAD, FrameError, lengths, packed, unpacked

KEY = "JINFER_JOB_KEY"  # of the environment
_MAGIC = b"jinfer 1"
_NONCE = 32
_HELLO = 1 << 16  # bytes of what is said before anybody is known
# A host that is gone sends nothing: asked after 5 s of silence, given up 15 s later.
_SILENT, _BETWEEN, _ASKED = 5, 5, 3


class LinkError(ConnectionError):
    """A connection that ended, or was never one."""


class StrangerError(LinkError):
    """The other end is no process of the job, and will not be one a moment later."""


class MessageError(LinkError):
    """What the other end says cannot be read."""


class Link:
    """A connection; several threads may send, one receives.

    Attributes:
        where: the other end, for messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._until: float | None = None
        self.where = _shown(connection)
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
        """The address here, at which others reach this process too."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Any) -> None:
        """Sends a message. Raises `LinkError`."""
        content = packed(message)
        try:
            with self._lock:
                self._socket.sendall(content)
        except OSError as error:
            raise LinkError(str(error)) from None

    def receive(self, most: int | None = None) -> Any:
        """The next message; waits for it.

        Args:
            most: bytes that it may have.

        Raises:
            LinkError: there is none any more.
            MessageError: it cannot be read.
        """
        try:
            text, data = lengths(bytes(self._exactly(HEAD)))
            if most is not None and text + data > most:
                raise FrameError(f"a message of {text + data} bytes")
            return unpacked(bytes(self._exactly(text)), memoryview(self._exactly(data)))
        except FrameError as error:
            raise MessageError(str(error)) from None

    def wait(self, seconds: float | None) -> None:
        """All that is received from now on has to come within this time, whatever the pieces.

        To send a message may take as long.
        """
        self._until = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    @property
    def ended(self) -> bool:
        """Whether the other end has gone, as far as can be told without waiting for anything."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            if not ready.select(0):
                return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for something."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def socket(self) -> socket.socket:
        """The connection itself, for what speaks otherwise over it."""
        self.wait(None)
        return self._socket

    def _exactly(self, count: int) -> bytearray:
        found, at = bytearray(count), 0
        view = memoryview(found)
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
        return found


def has_key() -> bool:
    """Whether strangers are kept out."""
    return bool(_key())


def known(connection: socket.socket, *, called: bool, seconds: float) -> Link:
    """A link, after both ends have shown that they know the key.

    Args:
        called: whether this end called the other one.
        seconds: that all of it may take, and what the other end says first.

    Raises:
        StrangerError: the other end does not know it, or is something else.
        LinkError: the connection ended before.
    """
    try:
        link = Link(connection)
    except OSError as error:  # it has ended already
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


def hello(link: Link) -> Hello:
    """What the other end says first. Raises `LinkError`."""
    try:
        return read_hello(link.receive(_HELLO))
    except FrameError as error:
        raise MessageError(str(error)) from None


def _proof(called: bool, own: bytes, other: bytes) -> bytes:
    return hmac.digest(_key(), b"ca"[called : called + 1] + own + other, "sha256")


def _key() -> bytes:
    return os.environ.get(KEY, "").encode()


def _shown(connection: socket.socket) -> str:
    host, port, *_ = connection.getpeername()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
