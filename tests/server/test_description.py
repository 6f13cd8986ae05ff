"""The description of the routes is true."""

from typing import Any

import jsonschema
import pytest

from jinfer.server.openapi import openapi_document
from jinfer.server.routes import ENDPOINTS
from tests.server.running import Running

HELLO = [{"role": "user", "content": "Hello"}]


def schema_of(path: str, method: str) -> dict[str, Any]:
    """What a whole answer is."""
    made = openapi_document(ENDPOINTS)
    answer = made["paths"][path][method]["responses"]["200"]["content"]["application/json"]
    return {**answer["schema"], "components": made["components"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", None),
        ("/version", None),
        ("/v1/models", None),
        ("/props", None),
        ("/slots", None),
        ("/openapi.json", None),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/tokenize", {"content": "a", "with_pieces": True}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", {"messages": HELLO}),
        ("/completion", {"prompt": "a", "n_predict": 2}),
        ("/", {"text": "a", "is_streaming_mode": False, "max_output_len": 2}),
    ],
)
def test_an_answer_is_as_described(smol: Running, path: str, body: Any) -> None:
    with smol.client() as http:
        short = {"max_tokens": 3} if body and path in ("/v1/chat/completions",) else {}
        answer = http.get(path) if body is None else http.post(path, json=body | short)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), schema_of(path, "get" if body is None else "post"))


def test_every_route_is_described() -> None:
    paths = openapi_document(ENDPOINTS)["paths"]
    for item in ENDPOINTS:
        for path in item.paths:
            assert item.method.lower() in paths[path.replace(":path}", "}")]


def test_a_page_without_another_host(smol: Running) -> None:
    with smol.client() as http:
        answer = http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/chat/completions" in answer.text
    assert "http" not in answer.text.replace("http-equiv", "")
    assert "<script" not in answer.text
