"""Server process: sockets, TLS, signals, startup and graceful shutdown (uvicorn)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from jinfer import progress
from jinfer.loader.config.config_json import SourceError
from jinfer.loader.sources import check_places
from jinfer.server.app import build_app
from jinfer.server.core.service import Service
from jinfer.server.http import request_log
from jinfer.server.http.client_shares import FairAccept, connection_limit, raise_descriptor_limit
from jinfer.server.http.server_settings import ModelSource
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.serve_flags import model_sources_of, overrides_of, server_settings_of

_log = logging.getLogger("jinfer.server")
_BACKLOG = 4096  # connections that the system queues until they are accepted
_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")  # the certificate first
_NOTIFY_SECONDS = 3  # seconds to notify clients at shutdown
_POLL_SECONDS = 0.1  # seconds between two checks for another signal
# Interpreter switch interval. Python's default of 5 ms delays the event loop by up to 20 ms when
# the engine and three workers compute.
_SWITCH_INTERVAL = 0.001


def serve(flags: Mapping[str, Any]) -> int:
    """Run the server until a signal stops it; return the exit status.

    Raises:
        SourceError, SpecError: an invalid flag.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    raise_descriptor_limit()
    sources, plain = model_sources_of(flags), _is_plain(flags["log_format"])
    log_as = {"plain": plain, "level": flags["log_level"]}
    settings = replace(server_settings_of(flags), log=log_as)
    grace = flags["stop_timeout"]
    failures: list[BaseException] = []
    services: list[Service] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    _check_tls(flags)
    for source in sources:  # fails before the first model is loaded
        check_places(source.path, source.overrides)
    registry = _registry(flags, sources)
    with _listeners(flags) as listeners:
        config = uvicorn.Config(
            build_app(registry, settings, on_load_error=failed, on_service=services.append),
            access_log=False,
            log_config=None,
            http=http_protocol(),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=None if grace is None else math.ceil(grace) + _NOTIFY_SECONDS,
            ssl_certfile=flags["ssl_certfile"],
            ssl_keyfile=flags["ssl_keyfile"],
            ssl_ca_certs=flags["ssl_ca_certs"],
            ssl_cert_reqs=ssl.CERT_REQUIRED if flags["ssl_ca_certs"] else ssl.CERT_NONE,
            lifespan="on",
        )
        with _tls_errors(flags):
            config.load()
        server = _Server(config, services[0], grace)
        log = request_log.set_up_logging(**log_as)
        progress.show(False)  # progress is logged instead
        where = _url(listeners[0], config.is_ssl)
        _log.info(
            "listening",
            extra={"at": where, "models": [source.name for source in registry.sources()]},
        )
        if plain and settings.page and not flags["uds"]:
            _log.info("to chat in a browser open %s/", _local(where))
        if not settings.keys and {*_hosts(flags)} - {"127.0.0.1", "localhost", "::1"}:
            _log.warning("anyone who reaches the port may use the server; set --api-key")
        # uvicorn re-raises the signal that stopped it, unless a handler is installed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            server.run(sockets=listeners)
            if not failures:
                _log.info("ended")
        finally:
            log.stop()
            progress.show(None)
    if failures:
        print(f"error: {failures[0]}", file=sys.stderr)
        return 2
    return 0


def _registry(flags: Mapping[str, Any], sources: Sequence[ModelSource]) -> ModelRegistry:
    """Create the registry of the server's models."""
    folder, file = (
        flags[key] and Path(flags[key]).expanduser() for key in ("models_dir", "models")
    )
    return ModelRegistry(tuple(sources), folder or None, file or None, overrides_of(flags))


class _Server(uvicorn.Server):
    """A uvicorn server with fair accept, which ends unfinished streams with an error.

    A second signal skips the grace period.
    """

    _accept: FairAccept | None = None

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float | None) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record a signal; uvicorn would exit at the second SIGINT without closing the models."""
        self._hurried = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on sockets; without httptools, uvicorn accepts."""
        config = self.config
        if http_protocol() == "auto":
            await super().startup(sockets)
            return
        from jinfer.server.http.http_protocol import HEAD_SECONDS, connection_shares

        await super().startup([])
        state, connections = self.lifespan.state, self.server_state.connections

        def make_protocol() -> asyncio.Protocol:
            arguments = {"config": config, "server_state": self.server_state, "app_state": state}
            return config.http_protocol_class(**arguments)

        shares, max_connections = connection_shares(state), connection_limit()
        arguments = (
            sockets or [],
            make_protocol,
            shares,
            connections,
            max_connections,
            config.ssl,
            HEAD_SECONDS,
        )
        self._accept = FairAccept(*arguments)
        self._accept.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let responses finish, within the grace period."""
        if self._accept is not None:
            self._accept.stop()
        self._service.models.refuse_requests()
        ending = asyncio.ensure_future(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end(self) -> None:
        end = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while time.monotonic() < end and not self._hurried:
            await asyncio.sleep(_POLL_SECONDS)
        self._service.cancel_answers()
        while not self._hurried:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)  # time to send the error
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def http_protocol() -> Any:
    """Return the HTTP protocol class; without httptools uvicorn's h11, which supports HTTP/1.0."""
    if find_spec("httptools") is None:
        return "auto"
    from jinfer.server.http.http_protocol import BoundedProtocol

    return BoundedProtocol


def _is_plain(form: str) -> bool:
    """Return whether the log is formatted for a terminal."""
    return form == "text" or (form == "auto" and sys.stderr is not None and sys.stderr.isatty())


def _local(where: str) -> str:
    """Return an address that a local browser can open."""
    return where.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _hosts(flags: Mapping[str, Any]) -> list[str]:
    """Return the addresses to listen on."""
    return [text.strip() for text in flags["host"].split(",")]


@contextlib.contextmanager
def _listeners(flags: Mapping[str, Any]) -> Iterator[list[socket.socket]]:
    """Open listening sockets with the same port. Raises `SourceError`."""
    path, listeners = flags["uds"], list[socket.socket]()
    port = 0 if path else flags["port"]
    with contextlib.ExitStack() as opened:
        for host in [""] if path else _hosts(flags):
            try:
                listener = opened.enter_context(_unix(Path(path)) if path else _tcp(host, port))
            except (OSError, OverflowError) as error:
                where = path or f"{host}:{port}"
                raise SourceError(f"cannot listen on {where}: {error}") from None
            listeners.append(listener)
            port = 0 if path else listener.getsockname()[1]  # port 0 became a free port
        own = _inode(Path(path)) if path else None
        yield listeners
    if path and own == _inode(Path(path)):  # unless another process has replaced it since
        Path(path).unlink(missing_ok=True)


def _inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _tcp(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(listener, address)


def _unix(path: Path) -> socket.socket:
    """Open a Unix socket for this user and group; replace a stale socket."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode) and not _is_listening(path):
            path.unlink()
    before = os.umask(0o117)
    try:
        return _listening(socket.socket(socket.AF_UNIX), str(path))
    finally:
        os.umask(before)


def _listening(listener: socket.socket, address: Any) -> socket.socket:
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_listening(path: Path) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(str(path))
        except OSError:
            return False
    return True


def _url(listener: socket.socket, tls: bool) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{shown}:{port}"


def _check_tls(flags: Mapping[str, Any]) -> None:
    """Raise `SourceError` for missing TLS files, or a key without a certificate."""
    for key in _TLS:
        flag = f"--{key.replace('_', '-')}"
        if flags[key] is not None and flags[_TLS[0]] is None:
            raise SourceError(f"{flag} needs --ssl-certfile")
        if flags[key] is not None and not Path(flags[key]).is_file():
            raise SourceError(f"{flag} {flags[key]}: there is no such file")


@contextlib.contextmanager
def _tls_errors(flags: Mapping[str, Any]) -> Iterator[None]:
    """Raise `SourceError` for unusable certificates and keys."""
    try:
        yield
    except OSError as error:  # SSLError is a subclass
        files = ", ".join(flags[key] for key in _TLS if flags[key])
        raise SourceError(f"{files}: {error}") from None
