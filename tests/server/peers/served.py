"""The servers that the cases are tried on."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_registry import ModelRegistry
from tests.engine.adapters import write_adapter
from tests.server.running import GOLDENS, SMOL, Running, serving
from tests.server.test_embeddings import MINILM
from tests.server.test_ranking import CPU, colbert
from tests.server.tool_models import CHATML
from tests.test_classification import FORMS, with_head, with_words

KEY = "sk-own"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["place"],
        },
    },
}


@dataclass(frozen=True)
class Target:
    """A server, or a model of a server."""

    running: Running
    model: str | None = None

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        """The answer to a JSON body, which has to have a status; its JSON, or its text."""
        headers = body.pop("headers", None)
        given = {"model": self.model, **body} if self.model else body
        with self.running.client() as http:
            answer = http.post(path, json=given, headers=headers)
        assert answer.status_code == status, f"{answer.status_code} {answer.text[:300]}"
        return _read(answer)

    def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """The answer to a path."""
        with self.running.client() as http:
            answer = http.get(path, headers=headers)
        assert answer.status_code == status, f"{answer.status_code} {answer.text[:300]}"
        return _read(answer)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream."""
        given = {"model": self.model, **body} if self.model else body
        with self.running.client() as http:
            answer = http.post(path, json=given | {"stream": True})
        assert answer.status_code == 200, answer.text[:300]
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def chat(self, status: int = 200, /, **body: Any) -> Any:
        """An answer of a few tokens to a conversation."""
        given = {"messages": HI, "max_tokens": 8, **body}
        return self.post("/v1/chat/completions", status, **given)

    def text(self, status: int = 200, /, **body: Any) -> Any:
        """An answer of a few tokens to a text."""
        given = {"prompt": "Once upon a time", "max_tokens": 8, **body}
        return self.post("/v1/completions", status, **given)

    def native(self, status: int = 200, /, **body: Any) -> Any:
        """An answer of a few tokens of llama.cpp's own route."""
        given = {"prompt": "Once upon a time", "n_predict": 8, **body}
        return self.post("/completion", status, **given)


def _read(answer: httpx.Response) -> Any:
    json_ = answer.headers.get("content-type", "").startswith("application/json")
    return answer.json() if json_ else answer.text


@dataclass(frozen=True)
class Servers:
    """What runs.

    Attributes:
        chat: SmolLM2, the only model of its server.
        thinks: the same with a template that thinks.
        vectors, ranker, classes, late: models of a server without one that writes.
        keyed: a small model behind a key.
        router: a folder of small models, of which two are in memory at a time.
        adapted: a small model with an adapter.
        folder: where its files lie.
    """

    chat: Target
    thinks: Target
    vectors: Target
    ranker: Target
    classes: Target
    late: Target
    keyed: Target
    router: Target
    adapted: Target
    folder: Path


def _encoders(folder: Path) -> list[ModelSource]:
    with_head(FORMS[0], folder / "classes")
    with_words(folder / "classes")
    shutil.copytree(GOLDENS / "bert_cls", folder / "ranker")
    with_words(folder / "ranker")
    colbert(folder / "late")
    names = ("ranker", "classes", "late")
    return [MINILM, *(ModelSource(name, str(folder / name), CPU) for name in names)]


@contextlib.contextmanager
def all_servers(folder: Path) -> Iterator[Servers]:
    """All servers, in this process."""
    tiny = {"dtype": "float32", "engine": {"slots": 2}}
    models = folder / "models"
    models.mkdir()
    for name in ("one", "two", "three"):
        (models / name).symlink_to(GOLDENS / "llama2")
    said = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = CHATML.replace("enable_thinking", "true").replace(
        "{{ m.content", said + "{{ m.content"
    )
    thinking = {"chat_template": template, "reasoning": "think"}
    adapter = write_adapter(folder / "adapter", 4, 1)
    keys = {**tiny, "adapters": {"a": str(adapter)}, "engine": {"slots": 2, "max_adapters": 3}}
    settings = ServerSettings(warm_up=False, slot_save_path=str(folder / "slots"))
    keyed = ServerSettings(warm_up=False, keys=(KEY,), cors=("http://localhost:8080",))
    few = ServerSettings(warm_up=False, max_loaded=2)
    loads = ServerSettings(warm_up=False, runtime_adapters=True)
    both = [
        ModelSource("smol", SMOL.path, {**SMOL.overrides, "engine": {"slots": 4}}, ("gpt-4o",)),
        ModelSource("thinks", SMOL.path, {**SMOL.overrides, "prompt": thinking}),
    ]
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        chat = enter(serving(both[:1], settings))
        other = enter(serving(both[1:]))
        encoders = enter(serving(_encoders(folder)))
        locked = enter(serving([ModelSource("tiny", str(GOLDENS / "llama2"), tiny)], keyed))
        router = enter(serving(ModelRegistry((), models, None, tiny), few))
        adapted = enter(serving([ModelSource("tiny", str(GOLDENS / "llama2"), keys)], loads))
        minilm, ranker, classes, late = (
            Target(encoders, name) for name in ("minilm", "ranker", "classes", "late")
        )
        small = Target(locked), Target(router), Target(adapted)
        yield Servers(
            Target(chat), Target(other), minilm, ranker, classes, late, *small, folder=folder
        )
