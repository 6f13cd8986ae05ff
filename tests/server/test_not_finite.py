"""Answers whose logits are NaN, in the forms of errors that each API has."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.running import Running

NORM = "decoder.norm.weight"
WORDS = "the logits are NaN or infinite: see what loading says of the weights"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture
def broken(smol: Running) -> Iterator[Running]:
    """The server with a NaN in the norm before the head."""
    llm = smol.model().llm
    name = next(n for n in llm.weights if n == NORM)
    values = np.array(llm.weights[name].values)
    llm.update_weights({name: np.full_like(values, np.nan)})
    yield smol
    llm.update_weights({name: values})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
        ("/v1/messages", CHAT),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}),
        ("/completion", {"prompt": "Hello", "n_predict": 4}),
        ("/v1/embeddings", {"input": "Hello"}),
    ],
)
def test_status_500_and_one_line(broken: Running, path: str, body: dict[str, Any]) -> None:
    with broken.client() as http:
        answer = http.post(path, json={"model": "smol", **body})
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert ("the vectors are NaN" if "embeddings" in path else WORDS) in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/api/chat", {"messages": CHAT["messages"]}),
        ("/completion", {"prompt": "Hello", "n_predict": 4}),
    ],
)
def test_streams(broken: Running, path: str, body: dict[str, Any]) -> None:
    """An error as the response, or as the last event of a stream that has begun."""
    with broken.client() as http:
        answer = http.post(path, json={"model": "smol", **body, "stream": True})
    assert answer.status_code in (200, 500)
    lines = [line for line in answer.text.splitlines() if line.strip()]
    last = next(line for line in reversed(lines) if WORDS in line)
    error = json.loads(last.removeprefix("data: ").removeprefix("error: "))
    assert WORDS in json.dumps(error)
    assert not any("finish_reason" in line and '"stop"' in line for line in lines)


def test_the_server_goes_on(smol: Running) -> None:
    with smol.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": "smol", **CHAT})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]
