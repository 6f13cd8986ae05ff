"""Image fetching: images from allowed hosts, guarded against server-side request forgery (SSRF).

A URL comes from a client, which must not make the server reach its own network. So a host must be
listed, every redirect is checked like the first URL, addresses that are not public are refused, and
the connection goes to the address that was checked (a name may resolve differently the next time).
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file
from jinfer.server.http.http_errors import invalid_request

SECONDS = 5.0  # for an image, with redirects
_REDIRECTS = 3
_MOVED = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_PIECE = 1 << 16  # bytes
# IPv6 addresses outside are local or translated to IPv4 (mapped, NAT64), as are those of 6to4.
_GLOBAL_V6, _6TO4 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("2002::/16")


class _FetchError(Exception):
    """Why a URL gives no image."""


def fetch_image(url: str, hosts: Collection[str], max_bytes: int, param: str) -> bytes:
    """Download an image. Slow: call it in a worker thread.

    Args:
        hosts: allowed hosts, with `:port` unless it is that of the scheme.
        max_bytes: maximum size of the image.
        param: the request field, for errors.

    Raises:
        ApiError: the URL is not allowed, or gives no image.
    """
    deadline = time.monotonic() + SECONDS
    try:
        for _ in range(_REDIRECTS + 1):
            found = _get(_allowed(url, hosts), max_bytes, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _FetchError(f"has more than {_REDIRECTS} redirects")
    except _FetchError as error:
        raise invalid_request(f"the image's URL {error}", param) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "strerror", None) or type(error).__name__)[:100]
        if time.monotonic() >= deadline:
            reason = f"it took longer than {SECONDS:g} seconds"
        raise invalid_request(f"the image could not be downloaded: {reason}", param) from None


def read_image_file(url: str, folder: str | None, max_bytes: int, param: str) -> bytes:
    """Read the image of a file: URL, only below a folder. Raises `ApiError`."""
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        inside = folder is not None and path.is_relative_to(Path(folder).resolve())
        if not inside or parts.netloc not in ("", "localhost") or parts.query:
            raise _FetchError("is not a file below --image-folder, the only ones that are read")
        return read_regular_file(path, max_bytes)
    except FileRefusedError as error:
        raise invalid_request(f"the image {error}", param) from None
    except (_FetchError, OSError, RuntimeError, ValueError) as error:
        reason = error if isinstance(error, _FetchError) else "is not a path"
        raise invalid_request(f"the image's URL {reason}", param) from None


def _allowed(url: str, hosts: Collection[str]) -> SplitResult:
    """Parse a URL, and check its scheme and host."""
    if not url.isprintable() or " " in url or "\\" in url:
        raise _FetchError("has characters that a URL cannot have")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise _FetchError("is neither http: nor https:; send a data: URL")
    host = parts.hostname or ""
    if "@" in parts.netloc:
        raise _FetchError("has a user name; leave it out")
    default = parts.port in (None, _PORTS[parts.scheme])
    if not (host in hosts and default) and f"{host}:{_port(parts)}" not in hosts:
        raise _FetchError(
            f"has the host {parts.netloc[:100]}, which is not among --image-hosts; send a data: URL"
        )
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not ip.is_global or ip.is_multicast or ip.is_reserved or ip.is_unspecified:
        return False
    return ip.version == 4 or (ip in _GLOBAL_V6 and ip not in _6TO4)


def _get(parts: SplitResult, max_bytes: int, deadline: float) -> bytes | str:
    """Request a URL; the body of the response, or where it redirects to."""
    host, path = parts.hostname or "", quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else ""
    with _connected(host, parts, deadline) as connection:
        headers = {"host": parts.netloc, "accept": "image/*", "accept-encoding": "identity"}
        connection.request("GET", path + query, headers={**headers, "user-agent": "jinfer"})
        with connection.getresponse() as response:
            if response.status in _MOVED and (target := response.getheader("location")):
                return target
            if response.status != 200:
                raise _FetchError(f"answers with status {response.status}")
            return _read(response, max_bytes, deadline)


def _read(response: http.client.HTTPResponse, max_bytes: int, deadline: float) -> bytes:
    """Read a body of limited size, until the deadline."""
    large = _FetchError(f"has an image of more than {max_bytes} bytes")
    length = response.getheader("content-length", "")
    announced = int(length) if length.isdecimal() else 0
    if announced > max_bytes:
        raise large
    data = bytearray()
    while piece := response.read1(_PIECE):
        data += piece
        if len(data) > max_bytes:
            raise large
    if time.monotonic() >= deadline:
        raise TimeoutError
    if len(data) < announced:
        raise _FetchError("ends early")
    return bytes(data)


@contextlib.contextmanager
def _connected(
    host: str, parts: SplitResult, deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """Connect to an address of the host that was checked; at the deadline the connection ends."""
    port = _port(parts)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(item[4][0]) for item in found]
    if not addresses or not all(map(is_public, addresses)):
        raise _FetchError(f"has the host {host}, whose address is not public")
    left = max(0.01, deadline - time.monotonic())
    connection = http.client.HTTPConnection(host, port, timeout=left)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((addresses[0], port), left))
        # A slow server could send a byte before each timeout, so a timer ends the connection.
        watched = stack.enter_context(plain.dup())
        timer = threading.Timer(left, _shut_down, (watched,))
        stack.callback(timer.cancel)
        timer.start()
        connection.sock, connection.auto_open = plain, 0
        if parts.scheme == "https":
            secure = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            connection.sock = stack.enter_context(secure)
        stack.callback(connection.close)
        yield connection


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        connection.shutdown(socket.SHUT_RDWR)
