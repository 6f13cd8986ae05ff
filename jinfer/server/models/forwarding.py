"""Forwarding: passes a request on to the process of its model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.types import Send

from jinfer.server.http.http_errors import ApiError, cancel_reason

_HEAD = 64 << 10  # bytes of a response's status and headers
_PIECE = 64 << 10
_IN_PATHS = "/:@!$&'()*+,;=~"
# Headers of a connection, or of this server, which has checked the key.
_OWN = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade"}
_OWN |= {"authorization", "x-api-key", "x-request-id", "expect", "te", "trailer"}
_NOT_BACK = {"connection", "keep-alive", "transfer-encoding", "x-request-id", "date", "server"}

type Failed = Callable[[ApiError], bytes]


async def forward(
    request: Request,
    body: bytes,
    id: str,
    path: str,
    send: Send,
    seconds: float,
    *,
    begun: Failed | None = None,
    failed: Failed | None = None,
) -> Exception | None:
    """Send a request to a Unix socket, and stream its response to the client.

    Args:
        id: the request's id.
        path: path of the socket.
        seconds: time limit for the client to take a piece.
        begun: formats errors of a stream that has begun; None: the client has received nothing.
        failed: formats an error in the middle of a stream; None: not a stream.

    Returns:
        The error that ended a stream, if any.

    Raises:
        ApiError: the process does not answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_HEAD)
    except OSError as error:
        raise _gone() from error
    started = begun is not None
    try:
        writer.write(_question(request, body, id) + body)
        status, headers = await _response_head(reader)
        if begun is not None and status != 200:
            whole = b"".join([piece async for piece in _body(reader, headers)])
            await _send(send, begun(_error_of(status, whole)), seconds, more=False)
            return None
        if begun is None:
            pairs = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()]
            kept = [(name, value) for name, value in pairs if name.decode() not in _NOT_BACK]
            async with asyncio.timeout(seconds):
                await send({"type": "http.response.start", "status": status, "headers": kept})
            started = True
        async for piece in _body(reader, headers):
            await _send(send, piece, seconds)
        await _send(send, b"", seconds, more=False)
        return None
    except TimeoutError:
        raise
    except (OSError, EOFError, ValueError) as error:
        return await _end(send, seconds, started, begun or failed, _gone(), error)
    except asyncio.CancelledError as error:
        reason = cancel_reason(error)
        if reason is None or not started:
            raise
        return await _end(send, seconds, started, begun or failed, reason, error)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _gone() -> ApiError:
    return ApiError(503, "the model's process has ended; try again", code="process_lost")


async def _end(
    send: Send,
    seconds: float,
    started: bool,
    failed: Failed | None,
    reason: ApiError,
    error: BaseException,
) -> Exception | None:
    """End a response with an error; raise it if the response has not begun."""
    if not started:
        raise reason from error
    await _send(send, b"" if failed is None else failed(reason), seconds, more=False)
    return reason


def _question(request: Request, body: bytes, id: str) -> bytes:
    """Format the request line and headers."""
    query = f"?{request.url.query}" if request.url.query else ""
    headers = {name: value for name, value in request.headers.items() if name not in _OWN}
    headers |= {"host": "localhost", "connection": "close", "x-request-id": id}
    headers["content-length"] = str(len(body))
    method = "GET" if request.method == "HEAD" else request.method
    # Quote the path again: it may have characters that a request line must not have.
    lines = [f"{method} {quote(request.scope['path'], safe=_IN_PATHS)}{query} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _response_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        left = int(headers.get("content-length", 0))
        while left:
            piece = await reader.read(min(left, _PIECE))
            if not piece:
                raise EOFError("the body is cut short")
            left -= len(piece)
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        data = await reader.readexactly(size + 2)
        yield data[:-2]


async def _send(send: Send, data: bytes, seconds: float, *, more: bool = True) -> None:
    async with asyncio.timeout(seconds):
        await send({"type": "http.response.body", "body": data, "more_body": more})


def _error_of(status: int, body: bytes) -> ApiError:
    """Parse the error of a response, in the format of any dialect."""
    try:
        error: Any = orjson.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = ""
    if isinstance(error, dict):
        return ApiError(
            status, str(error.get("message", "")), param=error.get("param"), code=error.get("code")
        )
    return ApiError(status, str(error) or "the request failed")
