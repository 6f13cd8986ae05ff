"""Collectives: has gloo and NCCL listen at the address that the other ranks know.

By default gloo takes an address that the hostname resolves to, which on many systems is a loopback
address, and NCCL any interface that it finds.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

_INTERFACE = "NCCL_SOCKET_IFNAME"  # NCCL's environment variable
_SIOCGIFADDR = 0x8915  # Linux's ioctl for an interface's address
_INET6 = Path("/proc/net/if_inet6")  # IPv6 addresses of interfaces


def listen_at(host: str) -> str:
    """Has gloo and NCCL listen at an address of this machine.

    To be called before JAX initializes its devices.

    Returns:
        Why gloo will not; "": it will.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if _INTERFACE not in os.environ and (name := interface_of(host)):
        os.environ[_INTERFACE] = f"={name}"
    return "" if _tell_gloo(host) else hostname_problem(host)


def hostname_problem(host: str) -> str:
    """An error if this machine's hostname does not resolve to `host`; "": it does."""
    name = socket.gethostname()
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    except OSError as error:
        addresses = [error.strerror or str(error)]
    if host in addresses:
        return ""
    return (
        f"gloo would listen where the hostname {name} leads to ({addresses[0]}), and the others "
        f"know this machine as {host}; write {host} before {name} in /etc/hosts"
    )


def interface_of(host: str) -> str:
    """The network interface with an address; "" where there is none."""
    plain = host.partition("%")[0]
    for _, name in socket.if_nameindex():
        if plain in (_ipv4(name), *_ipv6(name)):
            return name
    return ""


def _ipv4(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(udp.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def _ipv6(name: str) -> list[str]:
    addresses = []
    with suppress(OSError):
        for line in _INET6.read_text().splitlines():
            code, *_, interface = line.split()
            if interface == name:
                addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(code)))
    return addresses


def _tell_gloo(host: str) -> bool:
    """Registers a CPU backend with a gloo that listens at an address; whether that worked.

    JAX's public function registers a backend, but gloo's address needs private ones; where these
    are missing, nothing changes.
    """
    try:
        from jax._src import distributed, xla_bridge
        from jax.extend import backend
        from jaxlib import _jax

        cpu_client, gloo = xla_bridge.make_cpu_client, _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return False

    def devices() -> Any:
        client = distributed.global_state.client
        collectives = gloo(distributed_client=client, hostname=host) if client is not None else None
        return cpu_client(collectives)

    backend.register_backend_factory("cpu", devices, priority=0, fail_quietly=False)
    return True
