"""Shares of clients: bounds on what clients hold while the server waits for them.

A bound alone lets one client lock out all others. Here it is shared: when it is passed, of the
holders that have waited longest the one gives way whose address holds the most.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from ipaddress import IPv6Address
from itertools import islice
from typing import Protocol

_OLDEST = 64  # holders that are compared: few enough that an attack by many costs little
_RESERVED = 256  # descriptors of models, caches, logs and listeners
_PER_CONNECTION = 2  # descriptors: its own, and one to the process of the model that answers it
_MOST_DESCRIPTORS = 1 << 16


class Holder(Protocol):
    """What holds a share; hashable.

    Attributes:
        address: of the client, as `client_address` gives it.
    """

    address: str

    def give_way(self) -> None:
        """Ends what it holds; its share has ended already."""


class Shares[H: Holder]:
    """What holders have taken, in the order in which they began to wait.

    Attributes:
        limit: what all may hold together.
        total: what they hold.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: dict[H, int] = {}
        self._by_address: Counter[str] = Counter()

    def take(self, holder: H, amount: int = 1) -> None:
        """Adds to what a holder has; if the limit is passed, others give way, or it does itself."""
        self._held[holder] = self._held.get(holder, 0) + amount
        self._by_address[holder.address] += amount
        self.total += amount
        while self.total > self.limit:
            self.displace()

    def displace(self) -> None:
        """Lets the holder give way that has to go first."""
        oldest = islice(self._held, _OLDEST)
        first = max(oldest, key=lambda one: self._by_address[one.address], default=None)
        if first is not None:
            self.release(first)
            first.give_way()

    def release(self, holder: H) -> None:
        """Ends a share, if the holder has one."""
        if (amount := self._held.pop(holder, None)) is None:
            return
        self.total -= amount
        self._by_address[holder.address] -= amount
        if not self._by_address[holder.address]:
            del self._by_address[holder.address]


def client_address(client: tuple[str, int] | None) -> str:
    """What counts as one client: an IPv4 address, or an IPv6 network of 64 bits; "" if unknown."""
    address = "" if client is None else client[0]
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        found = IPv6Address(address)
        return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
    return address


def raise_descriptor_limit() -> None:
    """Allows this process as many descriptors as it may allow itself."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """How many connections there are descriptors for."""
    descriptors = _MOST_DESCRIPTORS
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = soft if 0 <= soft < descriptors else descriptors
    return max(1, (descriptors - _RESERVED) // _PER_CONNECTION)
