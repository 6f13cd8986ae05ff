"""LoRA adapters over HTTP: as a model's name, by llama.cpp's numbers, loaded by vLLM's routes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.openai.response_input import read_input, to_chat_request
from jinfer.server.openai.response_schemas import ResponseRequest
from jinfer.server.stores.response_store import ResponseStore
from tests.engine.adapters import write_adapter
from tests.engine.tiny import GOLDEN, PROMPTS
from tests.server.running import Running, serving

TOKENS = {"prompt": PROMPTS[3], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_adapter(tmp_path_factory.mktemp("adapter") / "a", 4, 1)
    keys: dict[str, Any] = {"dtype": "float32", "adapters.a": str(path), "engine.max_adapters": 2}
    settings = ServerSettings(warm_up=False, runtime_adapters=True, strict=True)
    with serving([ModelSource("tiny", str(GOLDEN), keys)], settings) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    with running.client() as http:
        return http.post(path, json=body)


def tokens(running: Running, **body: Any) -> list[int]:
    answer = post(running, "/v1/completions", **TOKENS | body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_routes(running: Running, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", 8, 2)
    plain, with_a = tokens(running, model="tiny"), tokens(running, model="a")
    assert plain != with_a
    assert tokens(running, lora=[{"id": 0, "scale": 1.0}]) == with_a
    assert tokens(running, lora=[{"id": 0, "scale": 0}]) == plain
    loaded = post(running, "/v1/load_lora_adapter", lora_name="b", lora_path=str(other))
    assert loaded.json() == {"status": "loaded the adapter b"}
    with_b = tokens(running, model="b")
    assert with_b not in (plain, with_a)
    assert tokens(running, lora=[{"id": 1}]) == with_b
    with running.client() as http:
        listed = http.get("/v1/models").json()["data"]
        assert http.get("/v1/models/b").json() == listed[2]
        assert [item["name"] for item in http.get("/lora-adapters").json()] == ["a", "b"]
    assert [item["id"] for item in listed] == ["tiny", "a", "b"]
    assert (listed[2]["parent"], listed[2]["root"]) == ("tiny", str(other))
    assert post(running, "/v1/unload_lora_adapter", lora_name="b").status_code == 200
    assert post(running, "/v1/completions", **TOKENS, model="b").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("load", {"lora_name": "x", "lora_path": "/absent"}, 400, "there is no such file"),
        ("load", {"lora_name": "a", "lora_path": str(GOLDEN)}, 400, "there is an adapter 'a'"),
        ("load", {"lora_name": "tiny", "lora_path": str(GOLDEN)}, 400, "is a model's name"),
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("unload", {"lora_name": "x"}, 404, "there is no model 'x'"),
        ("unload", {"lora_name": "tiny"}, 404, "there is no adapter 'tiny'"),
        ("", {"lora": [{"id": 7}]}, 400, "there is no adapter 7; there are 1"),
        ("", {"lora": [{"id": 0}, {"id": 0}]}, 400, "at most a single adapter"),
        ("", {"lora": [{"id": 0, "scale": "x"}]}, 400, "lora.0.scale"),
    ],
)
def test_errors(running: Running, path: str, body: dict[str, Any], status: int, said: str) -> None:
    if path:
        answer = post(running, f"/v1/{path}_lora_adapter", **body)
    else:
        answer = post(running, "/v1/completions", **TOKENS, **body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_adapter_routes_are_off_by_default(running: Running) -> None:
    settings = running.service.settings
    object.__setattr__(running.service, "settings", replace(settings, runtime_adapters=False))
    for name, body in (("load", {"lora_path": "x"}), ("unload", {})):
        answer = post(running, f"/v1/{name}_lora_adapter", lora_name="a", **body)
        assert (answer.status_code, "--runtime-adapters" in answer.text) == (403, True)
    object.__setattr__(running.service, "settings", settings)


def test_responses_name_their_adapter() -> None:
    body = ResponseRequest.model_validate({"model": "a", "input": "hello"})
    given = read_input(body, ResponseStore())
    assert to_chat_request(body, given, lambda field, why: None).model == "a"
