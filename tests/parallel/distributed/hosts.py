"""Two hosts: network namespaces with an address each, a cable between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_LISTENS = "0A"  # the state in /proc/net/tcp


@dataclass(frozen=True)
class Hosts:
    """Both of them, by number."""

    names: tuple[str, str]

    def before(self, host: int) -> list[str]:
        """What has a command run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cable(self, state: str) -> None:
        """Cuts the cable ("down"), or mends it ("up")."""
        _ip("-n", self.names[1], "link", "set", "cable", state)

    def on[T](self, host: int, work: Callable[[], T]) -> T:
        """What a function gives whose sockets are a host's."""
        found: list[T] = []

        def run() -> None:
            with Path(f"/var/run/netns/{self.names[host]}").open() as file:
                os.setns(file.fileno(), os.CLONE_NEWNET)
            found.append(work())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]

    def call(self, host: int, where: tuple[str, int], content: bytes = b"") -> socket.socket:
        """A connection from a host that says something, and then nothing."""

        def connect() -> socket.socket:
            connection = socket.create_connection(where, timeout=5)
            connection.sendall(content)
            return connection

        return self.on(host, connect)

    def listeners(self, host: int) -> list[tuple[str, int]]:
        """Where anybody listens."""
        text = self.on(host, lambda: Path("/proc/thread-self/net/tcp").read_text())
        six = self.on(host, lambda: Path("/proc/thread-self/net/tcp6").read_text())
        found = []
        for line in [*text.splitlines()[1:], *six.splitlines()[1:]]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENS:
                code, port = local.split(":")
                # An IPv6 socket has an IPv4 address as ::ffff:1.2.3.4.
                address = socket.inet_ntoa(bytes.fromhex(code[-8:])[::-1])
                assert code[:-8] in ("", "0000000000000000FFFF0000")
                found.append((address, int(port, 16)))
        return found


def missing() -> str:
    """Why there cannot be two hosts here; "": there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid():
        return "only root makes network namespaces"
    return "" if shutil.which("ip") else "there is no ip (iproute2)"


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, which are gone afterwards. Raises `CalledProcessError` where they cannot be."""
    own = uuid.uuid4().hex[:6]
    hosts = Hosts((f"jinfer-{own}-0", f"jinfer-{own}-1"))
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        one, other = hosts.names
        _ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", other)
        for name, address in zip(hosts.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield hosts
    finally:
        for name in hosts.names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: Any) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
