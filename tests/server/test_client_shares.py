"""Shares of what clients hold, and connections that are accepted by turns."""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from jinfer.server.http.client_shares import FairAccept, Shares, client_address, connection_limit


@dataclass(eq=False)
class One:
    """A holder that notes when it has given way."""

    address: str
    gone: bool = False

    def give_way(self) -> None:
        self.gone = True


def test_the_oldest_of_the_address_with_most_gives_way() -> None:
    shares = Shares[One](5)
    few, many = [One("a"), One("a")], [One("b") for _ in range(5)]
    for item in (*few, *many):
        shares.take(item)
    assert [item.gone for item in many] == [True, True, False, False, False]
    assert not any(item.gone for item in few)
    assert shares.total == 5


def test_amounts_count_and_what_is_released_is_free() -> None:
    shares = Shares[One](100)
    small, large, last = One("a"), One("b"), One("c")
    shares.take(small, 0)
    shares.take(small, 30)
    shares.take(large, 60)
    shares.take(large, 10)
    shares.take(last, 1)
    assert (small.gone, large.gone, shares.total) == (False, True, 31)
    for item in (small, small, large, last):
        shares.release(item)
    assert shares.total == 0
    assert not shares._by_address
    shares.displace()


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 5), "2001:db8:1:2::"),
        (("::ffff:10.0.0.1", 5), "10.0.0.1"),
        (("fe80::1%eth0", 5), "fe80::"),
        (None, ""),
    ],
)
def test_what_counts_as_one_client(client: Any, address: str) -> None:
    assert client_address(client) == address


def test_there_are_descriptors_for_connections() -> None:
    assert connection_limit() > 1


@dataclass
class Noted(asyncio.Protocol):
    """Notes the addresses of connections in the order in which they are set up."""

    addresses: list[str] = field(default_factory=list)

    def connection_made(self, transport: Any) -> None:
        self.addresses.append(transport.get_extra_info("peername")[0])


def accepted(wait: int, *, limit: int = 1000, most: int = 1000) -> tuple[list[str], int]:
    """Order of set up of 100 connections of an address and 2 of another; and the total."""
    noted, shares = Noted(), Shares[Any](limit)

    async def accept() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
            where = listener.getsockname()
            sources = ["127.0.2.1"] * 100 + ["127.0.2.2"] * 2
            clients = [socket.create_connection(where, 20, (source, 0)) for source in sources]
            accepting = FairAccept([listener], lambda: noted, shares, [], most, None, 1.0)
            accepting.start()
            async with asyncio.timeout(60):
                while len(noted.addresses) < wait:
                    await asyncio.sleep(0.01)
            accepting.stop()
            for client in clients:
                client.close()

    asyncio.run(accept())
    return noted.addresses, shares.total


def test_each_address_has_its_turn() -> None:
    """The last two connections would be behind a hundred others of another address."""
    addresses, held = accepted(102)
    assert addresses.count("127.0.2.2") == 2
    # Accepted in rounds of 64: most of the hundred are set up after them.
    assert max(i for i, address in enumerate(addresses) if address == "127.0.2.2") < 80
    assert held == 0


def test_connections_that_are_not_set_up_give_way() -> None:
    addresses, held = accepted(1, limit=4)
    assert held == 0
    assert len(addresses) < 100
    addresses, held = accepted(1, most=4)
    assert held == 0
    assert len(addresses) < 100
