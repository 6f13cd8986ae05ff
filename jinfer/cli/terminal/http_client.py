"""HTTP client for OpenAI-compatible servers, with the standard library (server-sent events)."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from jinfer.engine.requests import RequestError
from jinfer.sandbox.sanitize import sanitized
from jinfer.version import __version__

DEFAULT_URL = "http://127.0.0.1:8080"
_CONNECT = 10.0  # seconds
_MAX_ERROR = 1 << 16  # bytes of an error response
_MAX_LINE = 16 << 20  # bytes of one event
_IGNORED = "x-jinfer-ignored"  # header that names request fields without effect
_FULL = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI, llama.cpp


class RemoteError(RequestError):
    """A failed request: the server's error, or a connection error.

    Attributes:
        full: whether the conversation exceeds the model's context.
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(sanitized(" ".join(message.split())))
        self.full = full


@dataclass(frozen=True)
class ServerConnection:
    """A server's address.

    Attributes:
        url: http://..., https://... or unix:/path, with or without a trailing /v1.
        key: the API key.
        timeout: seconds of silence until a request fails; None: no limit.
    """

    url: str = DEFAULT_URL
    key: str | None = None
    timeout: float | None = None

    def models(self) -> list[str]:
        """The names of the served models. Raises `RemoteError`."""
        with self._request("GET", "/v1/models", None) as answer:
            found = _json(answer.read())
        named = [item.get("id") for item in dicts_in(found.get("data"))]
        return [name for name in named if isinstance(name, str)]

    def whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request for a whole response. Raises `RemoteError`."""
        with self._request("POST", path, body) as answer:
            return _json(answer.read())

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Send a request and yield its events as they come. Raises `RemoteError`."""
        with self._request("POST", path, body) as answer:
            while line := answer.readline(_MAX_LINE + 1):
                if len(line) > _MAX_LINE:
                    raise RemoteError(f"{self.url}: an event is longer than {_MAX_LINE} bytes")
                name, _, data = line.strip().partition(b":")
                if name != b"data":
                    continue
                if (data := data.strip()) == b"[DONE]":
                    return
                event = _json(data)
                if "error" in event:
                    raise _error_of_body(event, "the answer ended with an error")
                yield event
        raise RemoteError(f"{self.url}: the connection closed in the middle of the answer")

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; yield the successful response, and convert errors while it is read."""
        parts = _parts(self.url)
        connection = _connection(parts)
        base = "" if parts.scheme == "unix" else parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "User-Agent": f"jinfer/{__version__}"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
            connection.request(method, base + path, content, headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise _error_of_response(answer)
            if ignored := answer.getheader(_IGNORED):
                print(f"ignored by the server: {sanitized(ignored)}", file=sys.stderr)
            yield answer
        except TimeoutError:
            raise RemoteError(f"{self.url}: the server sends nothing") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise RemoteError(
                f"{self.url}: cannot be reached: {why}; set --url or JINFER_URL"
            ) from None
        except http.client.HTTPException as error:
            why = str(error) or type(error).__name__
            raise RemoteError(f"{self.url}: does not speak HTTP: {why}") from None
        finally:
            connection.close()


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def dicts_in(value: object) -> list[dict[str, Any]]:
    """The objects of a list; empty if it is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url or url.startswith("unix:") else f"http://{url}")
        usable = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        _ = parts.port  # raises ValueError for a bad port
    except ValueError as error:
        raise RemoteError(f"{url}: is no address: {error}") from None
    if parts.scheme not in ("http", "https", "unix") or not usable:
        raise RemoteError(f"{url}: write http://HOST:PORT, https://HOST or unix:/PATH")
    return parts


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    if parts.scheme == "unix":
        return UnixConnection(parts.path, _CONNECT)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(str(parts.hostname), parts.port, timeout=_CONNECT)


def _object(content: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        result = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def _json(content: bytes) -> dict[str, Any]:
    if (result := _object(content)) is None:
        raise RemoteError(f"the server's answer is no JSON object: {content[:200]!r}")
    return result


def _error_of_response(answer: http.client.HTTPResponse) -> RemoteError:
    """The error for a failed response, with the server's message if it has one."""
    content = answer.read(_MAX_ERROR)
    status = f"{answer.status} {answer.reason}".strip()
    text = content.decode(errors="replace").strip()
    is_page = "html" in (answer.getheader("Content-Type") or "")
    otherwise = status if is_page or not text else f"{status}: {text}"
    found = _object(content)
    return RemoteError(otherwise) if found is None else _error_of_body(found, otherwise)


def _error_of_body(body: Mapping[str, Any], default: str) -> RemoteError:
    """The error in a JSON body: OpenAI's format, or a text under a common key."""
    error = body.get("error", body)
    if not isinstance(error, Mapping):
        return RemoteError(str(error))
    message = error.get("message") or error.get("detail") or default
    full = any(error.get(name) in _FULL for name in ("code", "type"))
    return RemoteError(str(message), full=full)
