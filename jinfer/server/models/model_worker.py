"""Model worker: the server's handle of a model in its own process.

Opening a model holds Python's interpreter lock for tenths of a second, in libraries that build the
tokenizer of a large vocabulary. In its own process this delays no request, and the end of the
process frees all memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.types import Send

from jinfer.cli.terminal.http_client import UnixConnection
from jinfer.engine.engine_stats import Stats
from jinfer.engine.requests import RequestError
from jinfer.server.http.http_errors import ApiError, cancel_reason
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_details import ModelDetails

_SECONDS = 30.0  # for a process to end, or to respond
_SOCKET = "model.sock"
_COMMAND = (sys.executable, "-m", "jinfer.server.model_process")
# Settings of the server's own tasks, which a model process does not have.
_OF_SERVER: dict[str, Any] = {
    "keys": (),
    "cors": (),
    "page": False,
    "autoload": True,
    "max_loaded": None,
    "idle_unload": None,
    "idle_sleep": None,
    "files_dir": None,
    "responses_dir": None,
    "max_responses": 0,
    "logits_processors": {},
    "model_processes": False,
    "is_worker": True,
}


class ModelWorker:
    """A loaded model in another process, which serves a Unix socket.

    Its methods wait for the process: call them in threads.

    Attributes:
        socket: path of its socket.
        adapters: LoRA adapters: name -> source.
        last: the last known statistics.
    """

    def __init__(self, source: ModelSource, settings: ServerSettings) -> None:
        """Start a process that loads a model, and wait for it.

        Args:
            settings: the server's.

        Raises:
            RequestError: the model cannot be loaded.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="jinfer-model-"))
        self.socket = str(self._folder / _SOCKET)
        self.adapters: dict[str, str] = {}
        self.last = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            answer = self._ask_start(_question(source, settings, self.socket))
        except BaseException:
            self.close()
            raise
        self.details, self.adapters = _details(answer), answer["adapters"]

    def _ask_start(self, question: bytes) -> Any:
        """Send the job to the process, and return its answer once the model is loaded."""
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(question)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return _checked_answer(answer, None if answer else self._process.wait(_SECONDS))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def stats(self) -> Stats:
        """Return the model's statistics; the last known if it does not respond."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            answer = json.loads(self._ask("GET", "/worker"))
            self.last, self.adapters = Stats(**answer["stats"]), answer["adapters"]
        return self.last

    def sleep(self, level: int) -> None:
        """Let the model sleep; see `LLM.sleep`."""
        self._ask("POST", f"/sleep?level={level}")

    def wake_up(self) -> None:
        """Wake the model; see `LLM.wake_up`."""
        self._ask("POST", "/wake_up")

    def close(self) -> None:
        """End the process; its answers end with an error."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()  # which ends it
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, method: str, path: str) -> bytes:
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise RequestError(str(json.loads(body)["error"]["message"]))
        return body


def describe_in_process(
    source: ModelSource, settings: ServerSettings
) -> tuple[dict[str, Any], ModelDetails]:
    """Describe a model for /api/show in another process.

    Raises:
        RequestError: the model cannot be opened.
    """
    question = _question(source, settings, "")
    done = subprocess.run(_COMMAND, input=question, stdout=subprocess.PIPE, check=False)
    answer = _checked_answer(done.stdout, done.returncode)
    return answer["description"], _details(answer)


def _question(source: ModelSource, settings: ServerSettings, socket: str) -> bytes:
    """Format the job of a process; without a socket the process only describes the model."""
    own = replace(settings, **_OF_SERVER)
    alone = replace(source, on_demand=False, pinned=True, idle_unload=None)
    named = settings.logits_processors.items()
    job = {
        "source": asdict(alone),
        "settings": asdict(own),
        "processors": [
            f"{name}={source.__module__}:{source.__qualname__}" for name, source in named
        ],
        "socket": socket,
    }
    return json.dumps(job).encode() + b"\n"


def _checked_answer(answer: bytes, status: int | None) -> Any:
    """Return the answer of a process. Raises `RequestError` for an error or no answer."""
    if not answer:
        raise RequestError(f"the model's process has ended with the status {status}")
    value = json.loads(answer)
    if "error" in value:
        raise RequestError(value["error"])
    return value


def _details(answer: Any) -> ModelDetails:
    known = answer["details"]
    return ModelDetails(**{**known, "capabilities": tuple(known["capabilities"])})


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
        writer.write(_request_head(request, body, id) + body)
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


def _request_head(request: Request, body: bytes, id: str) -> bytes:
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
