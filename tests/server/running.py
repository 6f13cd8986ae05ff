"""Test server: runs on a thread of the test process."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from jinfer.server.app import build_app
from jinfer.server.core.service import Service
from jinfer.server.http.http_protocol import BoundedProtocol
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.models.served_model import ServedModel

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SMOL = ModelSource("smol", str(ROOT / "specs" / "smollm2_135m_instruct.toml"), {"dtype": "float32"})


@dataclass(frozen=True)
class Running:
    """A running server.

    Attributes:
        url: base URL.
        service: the service.
    """

    url: str
    service: Service

    def model(self, name: str | None = None) -> ServedModel:
        """Return a model by its name."""
        return self.service.models.by_name(name)

    def held(self, name: str | None = None) -> int:
        """Count the KV cache blocks that requests hold, once the engine has read all messages."""
        if self.model(name).llm_or_none is None:  # not loaded yet
            return 0
        llm = self.model(name).llm
        llm.session.thread.run(lambda engine: None)
        return llm.stats().blocks_held

    def holds_nothing(self, name: str | None = None, seconds: float = 20) -> bool:
        """Wait until no request holds blocks, runs or waits; return whether that happened."""
        end = time.monotonic() + seconds
        while (left := self.held(name) or self._requests(name)) and time.monotonic() < end:
            time.sleep(0.01)
        return not left

    def _requests(self, name: str | None) -> int:
        if (llm := self.model(name).llm_or_none) is None:
            return 0
        stats = llm.stats()
        return stats.running + stats.waiting

    def client(self, **more: Any) -> httpx.Client:
        """Create a client."""
        return httpx.Client(base_url=self.url, timeout=120, **more)


@contextlib.contextmanager
def serving(
    models: Sequence[ModelSource] | ModelRegistry,
    settings: ServerSettings | None = None,
    *,
    wait: bool = True,
    protocol: type[BoundedProtocol] = BoundedProtocol,
) -> Iterator[Running]:
    """Run a server with models; wait until they are loaded."""
    registry = models if isinstance(models, ModelRegistry) else ModelRegistry(tuple(models))
    app = build_app(registry, settings or ServerSettings(warm_up=False))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=protocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        running = Running(f"http://127.0.0.1:{port}", service_of(app))
        while wait and httpx.get(f"{running.url}/health").status_code != 200:
            time.sleep(0.02)
        yield running
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive(), "the server did not end"


def service_of(app: Any) -> Service:
    """Return the service of an app, behind its middleware."""
    while not hasattr(app, "state"):
        app = app.app
    return app.state.service
