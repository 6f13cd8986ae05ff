"""A connection of two processes, and how each shows that it belongs to the job.

Whoever connects proves that it knows the job's key, and has the other side prove the same, before
anything else is read. Without a key the network has to be the job's own, as JAX's own connections
take it to be.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import threading
from typing import Any

from jinfer.distributed.frames import HEAD, FrameError, lengths, packed, unpacked

KEY = "JINFER_JOB_KEY"  # of the environment
_MAGIC = b"jinfer 1"
_NONCE = 32
_HELLO = 1 << 16  # bytes of what is said before anybody is known
# A host that is gone sends nothing: asked after 5 s of silence, given up 15 s later.
_SILENT, _BETWEEN, _ASKED = 5, 5, 3


class LinkError(ConnectionError):
    """A connection that ended, or was never one."""


class Link:
    """A connection; several threads may send, one receives.

    Attributes:
        where: the other end, for messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
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
            LinkError: there is none any more, or it cannot be read.
        """
        try:
            text, data = lengths(bytes(self._exactly(HEAD)))
            if most is not None and text + data > most:
                raise FrameError(f"a message of {text + data} bytes")
            return unpacked(bytes(self._exactly(text)), memoryview(self._exactly(data)))
        except FrameError as error:
            raise LinkError(str(error)) from None

    def wait(self, seconds: float | None) -> None:
        """From now on `receive` and `send` take no longer than this."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        found, at = bytearray(count), 0
        view = memoryview(found)
        while at < count:
            try:
                size = self._socket.recv_into(view[at:])
            except OSError as error:
                raise LinkError(str(error)) from None
            if not size:
                raise LinkError("the connection was closed")
            at += size
        return found


def known(connection: socket.socket, *, called: bool, seconds: float) -> Link:
    """A link, after both ends have shown that they know the key.

    Args:
        called: whether this end called the other one.

    Raises:
        LinkError: the other end does not know it, or is something else.
    """
    link = Link(connection)
    link.wait(seconds)
    nonce = secrets.token_bytes(_NONCE)
    try:
        connection.sendall(_MAGIC + nonce)
        theirs = bytes(link._exactly(len(_MAGIC) + _NONCE))
        if not theirs.startswith(_MAGIC):
            raise LinkError("something else than jinfer answers there")
        other = theirs[len(_MAGIC) :]
        connection.sendall(_proof(called, nonce, other))
        proof = bytes(link._exactly(hashlib.sha256().digest_size))
    except OSError as error:
        link.close()
        raise LinkError(str(error)) from None
    if not hmac.compare_digest(proof, _proof(not called, other, nonce)):
        link.close()
        raise LinkError(f"the other process has another {KEY}")
    return link


def hello(link: Link) -> Any:
    """What the other end says first. Raises `LinkError`."""
    return link.receive(_HELLO)


def _proof(called: bool, own: bytes, other: bytes) -> bytes:
    return hmac.digest(_key(), b"ca"[called : called + 1] + own + other, "sha256")


def _key() -> bytes:
    return os.environ.get(KEY, "").encode()


def _shown(connection: socket.socket) -> str:
    host, port, *_ = connection.getpeername()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
