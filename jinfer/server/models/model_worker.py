"""Model worker: the server's handle of a model in its own process.

Opening a model holds Python's interpreter lock for tenths of a second, in libraries that build the
tokenizer of a large vocabulary. In its own process this delays no request, and the end of the
process frees all memory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jinfer.engine.engine_stats import Stats
from jinfer.engine.requests import RequestError
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
        connection = _UnixConnection(self.socket)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise RequestError(str(json.loads(body)["error"]["message"]))
        return body


def asked_process(
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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)
