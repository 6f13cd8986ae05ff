"""Where gloo and NCCL listen: at the address that the other processes of the job know.

By themselves gloo takes an address that the hostname resolves to, which on many systems is the
machine's own, and NCCL an interface that it finds.
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

_INTERFACE = "NCCL_SOCKET_IFNAME"  # of NCCL's environment
_SIOCGIFADDR = 0x8915  # asks Linux for an interface's address
_INET6 = Path("/proc/net/if_inet6")  # addresses of interfaces, as Linux shows them


def listen_at(host: str) -> str:
    """Has gloo and NCCL listen at an address of this machine.

    To be called before JAX has a device.

    Returns:
        Why gloo would not; "": it will.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if _INTERFACE not in os.environ and (name := interface_of(host)):
        os.environ[_INTERFACE] = f"={name}"
    return "" if _tell_gloo(host) else misleading(host)


def misleading(host: str) -> str:
    """What is wrong where this machine's name does not lead to an address of it; "": it does."""
    name = socket.gethostname()
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(name, None)]
    except OSError as error:
        found = [error.strerror or str(error)]
    if host in found:
        return ""
    return (
        f"gloo would listen where the hostname {name} leads to ({found[0]}), and the others know "
        f"this machine as {host}; write {host} before {name} in /etc/hosts"
    )


def interface_of(host: str) -> str:
    """The network interface that has an address; "" where it is not found."""
    plain = host.partition("%")[0]
    for _, name in socket.if_nameindex():
        if plain in (_ipv4(name), *_ipv6(name)):
            return name
    return ""


def _ipv4(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        given = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, given)[20:24])
    return ""


def _ipv6(name: str) -> list[str]:
    found = []
    with suppress(OSError):
        for line in _INET6.read_text().splitlines():
            code, *_, of = line.split()
            if of == name:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(code)))
    return found


def _tell_gloo(host: str) -> bool:
    """Has JAX make its CPU devices with a gloo that listens at an address.

    JAX has a public function for how devices are made, and none for gloo's address; where what
    gives it is not there, nothing changes.
    """
    try:
        from jax._src import distributed, xla_bridge
        from jax.extend import backend
        from jaxlib import _jax

        made, gloo = xla_bridge.make_cpu_client, _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return False

    def devices() -> Any:
        client = distributed.global_state.client
        return made(gloo(distributed_client=client, hostname=host) if client is not None else None)

    backend.register_backend_factory("cpu", devices, priority=0, fail_quietly=False)
    return True
