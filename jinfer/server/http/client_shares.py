"""Shares of clients: bounds on what clients hold while the server waits for them.

A plain bound lets a single client lock out all others. Here addresses share it: when it is
exceeded, the address that holds the most loses its longest-waiting holder.
"""

from __future__ import annotations

import contextlib
from collections import Counter
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
