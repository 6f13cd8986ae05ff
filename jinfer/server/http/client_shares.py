"""Client shares: limits of what clients hold while the server waits for them, and fair accept.

A plain bound lets a single client lock out all others. Here addresses share it: when it is
exceeded, the address that holds the most loses its longest-waiting holder.

New connections are accepted by client address in turn, a few in a round of the event loop. A
listener's queue is first in, first out: a client that opens thousands of connections would keep all
others waiting until the server has set each of them up. Here connections are accepted at once, at
the cost of a descriptor, and set up in turns; an address with many has its newest set up first,
since other clients may share the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Protocol

_RESERVED = 256  # descriptors of models, caches, logs and listeners
_PER_CONNECTION = 2  # descriptors: the connection's, and another to the model's process
_MOST_DESCRIPTORS = 1 << 16


class Holder(Protocol):
    """The holder of a share; hashable.

    Attributes:
        address: the client's, from `client_address`.
    """

    address: str

    def give_way(self) -> None:
        """Release the resource; the share has ended already."""


class Shares[H: Holder]:
    """Shares by address, in the order in which their holders began to wait.

    Attributes:
        limit: maximum total.
        total: current total.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: dict[str, dict[H, int]] = {}  # by address
        self._by_address: Counter[str] = Counter()

    def take(self, holder: H, amount: int = 1) -> None:
        """Add to a holder's share; beyond the limit, other holders or this holder give way."""
        held = self._held.setdefault(holder.address, {})
        held[holder] = held.get(holder, 0) + amount
        self._by_address[holder.address] += amount
        self.total += amount
        while self.total > self.limit:
            self.displace()

    def displace(self) -> None:
        """Make the next holder give way."""
        if self._held:
            first = next(iter(self._held[max(self._by_address, key=self._by_address.__getitem__)]))
            self.release(first)
            first.give_way()

    def release(self, holder: H) -> None:
        """End a share, if the holder has one."""
        held = self._held.get(holder.address, {})
        if (amount := held.pop(holder, None)) is None:
            return
        self.total -= amount
        self._by_address[holder.address] -= amount
        if not held:
            del self._held[holder.address], self._by_address[holder.address]


def client_address(client: tuple[str, int] | None) -> str:
    """Return a client's identity: an IPv4 address, or an IPv6 /64 network; "" if unknown."""
    address = "" if client is None else client[0]
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        found = IPv6Address(address)
        return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
    return address


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = (
            _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
        )
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connection_limit() -> int:
    """Return the number of connections that the descriptors suffice for."""
    descriptors = _MOST_DESCRIPTORS
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = soft if 0 <= soft < descriptors else descriptors
    return max(1, (descriptors - _RESERVED) // _PER_CONNECTION)


_ACCEPTED = 256  # connections accepted from a listener in a round
_TURNS = 32  # connections set up in a round
_PAUSE_SECONDS = 0.005  # between two rounds, so that running requests get time during a flood
_NO_DESCRIPTOR_SECONDS = 0.1  # until the next attempt without a free descriptor


@dataclass(eq=False)
class AcceptedSocket:
    """A connection that is not set up.

    Attributes:
        socket: its socket.
        address: the client's.
        accepting: the acceptor.
        begun: whether it is being set up, TLS included.
    """

    socket: socket.socket
    address: str
    accepting: FairAccept
    begun: bool = False

    def give_way(self) -> None:
        """Close it."""
        if (
            self.begun
        ):  # the transport ends with the socket; a cancelled task might leave the protocol open
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        else:
            self.accepting.forget(self)
            self.socket.close()


type _Queue = OrderedDict[AcceptedSocket, None]  # of an address


@dataclass
class FairAccept:
    """Accepts the connections of some listeners.

    Attributes:
        listeners: sockets that listen.
        make_protocol: makes the protocol of a connection.
        shares: shares of connections whose clients the server waits for.
        connections: connections that are set up.
        max_connections: maximum number of connections.
        ssl: TLS settings; None: plain text.
        handshake_seconds: time limit of TLS handshakes.
    """

    listeners: Sequence[socket.socket]
    make_protocol: Callable[[], asyncio.Protocol]
    shares: Shares[Holder]
    connections: Collection[object]
    max_connections: int
    ssl: ssl.SSLContext | None
    handshake_seconds: float
    _accepted: set[AcceptedSocket] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # By address, in the order of their turns.
    _queues: OrderedDict[str, OrderedDict[AcceptedSocket, None]] = field(
        default_factory=OrderedDict
    )
    _scheduled: bool = False
    _ended: bool = False

    def start(self) -> None:
        """Begin to accept."""
        for listener in self.listeners:
            listener.setblocking(False)
            self._resume(listener)

    def stop(self) -> None:
        """Stop accepting, and close the connections that are not set up."""
        self._ended = True
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)
        for connection in list(self._accepted):
            connection.give_way()

    def _resume(self, listener: socket.socket) -> None:
        if not self._ended:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED):
            try:
                accepted, client = listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError:  # no descriptor; the listener would be ready again at once
                self._pause(listener, _NO_DESCRIPTOR_SECONDS)
                self.shares.displace()
                break
            accepted.setblocking(False)
            address = client_address(client if isinstance(client, tuple) else None)
            connection = AcceptedSocket(accepted, address, self)
            if address not in self._queues:  # before the addresses that had a turn
                self._queues[address] = OrderedDict()
                self._queues.move_to_end(address, last=False)
            self._queues[address][connection] = None
            self._accepted.add(connection)
            self.shares.take(connection)
            if len(self.connections) + len(self._accepted) > self.max_connections:
                self.shares.displace()
        else:
            self._pause(listener, _PAUSE_SECONDS)
        if not self._scheduled:
            self._take_turns()

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(seconds, self._resume, listener)

    def _take_turns(self) -> None:
        """Begin to set up the next connections."""
        self._scheduled = False
        for _ in range(_TURNS):
            if not self._queues:
                break
            address, queue = next(iter(self._queues.items()))
            connection, _ = queue.popitem(last=len(queue) > _TURNS)
            self._queues.move_to_end(address)
            if not queue:
                del self._queues[address]
            connection.begun = True
            task = asyncio.get_running_loop().create_task(self._set_up(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._queues:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._take_turns)

    async def _set_up(self, connection: AcceptedSocket) -> None:
        seconds = None if self.ssl is None else self.handshake_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make_protocol, connection.socket, ssl=self.ssl, ssl_handshake_timeout=seconds
            )
        except OSError:  # the client disconnected, or does not speak TLS
            connection.socket.close()
        finally:
            self.forget(connection)

    def forget(self, connection: AcceptedSocket) -> None:
        """End the share of a connection, and its place in the queue."""
        self._accepted.discard(connection)
        self.shares.release(connection)
        if (queue := self._queues.get(connection.address)) is not None:
            queue.pop(connection, None)
            if not queue:
                del self._queues[connection.address]
