"""Activations over HTTP: captured, steered, edited; steering vectors that the server keeps."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jinfer import Edit, Steer
from jinfer.loader.open_model import open_files
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.engine.test_activation_requests import VECTOR, write_control_vector
from tests.engine.tiny import PROMPTS
from tests.server.running import Running, serving
from tools.bench_models import LlamaShape, make_up

STREAM, HEADS = "decoder.1.x", "decoder.0.attn.heads"
KEYS: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
TOKENS = {"prompt": PROMPTS[3], "return_token_ids": True, **KEYS}
SETTINGS = ServerSettings(warm_up=False, strict=True, allow_inspection=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model of random weights that has a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights
    make_up(LlamaShape(2, 64, 4, 2, 96), words, path, "Q4_0")
    with serving([ModelSource("tiny", str(path), {"dtype": "float32"})], SETTINGS) as running:
        yield running


def post(running: Running, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    with running.client() as http:
        return http.post(path, json=body)


def choice(running: Running, **body: Any) -> dict[str, Any]:
    answer = post(running, **TOKENS | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def npy(values: np.ndarray) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, values)
    return {"npy": base64.b64encode(file.getvalue()).decode()}


def test_fields_are_those_of_python(running: Running) -> None:
    llm = running.model().llm
    (trace,) = llm.trace([PROMPTS[1]], "decoder.0.x")
    patch = trace["decoder.0.x"][:2]
    steer = {"name": STREAM, "scale": 2.0, "tokens": "answer"}
    edits = [
        {"name": HEADS, "operation": "set", "value": 0, "head": 1},
        {"name": "decoder.0.x", "operation": "set", "value": npy(patch), "tokens": [3, 5]},
    ]
    (expected,) = llm.generate(
        [PROMPTS[3]],
        **KEYS,
        steer=Steer(STREAM, VECTOR, 2.0, "answer"),
        edits=[
            Edit(HEADS, "set", 0, head=1),
            Edit("decoder.0.x", "set", patch, slice(3, 5)),
        ],
        capture=[STREAM, HEADS],
    )
    asked = {"edits": edits, "capture": ["decoder.1.*x", HEADS]}
    lists = choice(running, steer=[steer | {"vector": VECTOR.tolist()}], **asked)
    arrays = choice(
        running, steer=[steer | {"vector": npy(VECTOR)}], **asked, capture_format="list"
    )
    for found in (lists, arrays):
        assert found["token_ids"] == expected.token_ids
        assert set(found["captured"]) == {STREAM, HEADS}
    for name, values in expected.captured.items():
        given, listed = lists["captured"][name], arrays["captured"][name]
        assert given["shape"] == listed["shape"] == [*values.shape]
        read = np.load(io.BytesIO(base64.b64decode(given["npy"])))
        np.testing.assert_array_equal(read, values)
        np.testing.assert_array_equal(np.array(listed["values"], np.float32), values)
    assert "captured" not in choice(running)


def test_chat(running: Running) -> None:
    llm, steer = running.model().llm, {"name": STREAM, "vector": VECTOR.tolist()}
    expected = llm.chat("Hello", **KEYS, steer=Steer(STREAM, VECTOR), capture=[STREAM, HEADS])
    messages = [{"role": "user", "content": "Hello"}]
    asked: dict[str, Any] = {"messages": messages, "steer": [steer], "return_token_ids": True}
    answer = post(running, "/v1/chat/completions", **KEYS, **asked, capture=[STREAM, HEADS])
    (found,) = answer.json()["choices"]
    assert found["token_ids"] == expected.token_ids
    for name, values in expected.captured.items():
        read = np.load(io.BytesIO(base64.b64decode(found["captured"][name]["npy"])))
        np.testing.assert_array_equal(read, values)
    keys = {"model": "tiny", "messages": messages, "steer": [steer], **KEYS}
    assert post(running, "/v1/messages", **keys).json()["content"][0]["text"] == expected.text


def test_kept_vectors(running: Running, tmp_path: Path) -> None:
    path = write_control_vector(tmp_path / "happy.gguf", {"direction.1": VECTOR})
    with running.client() as http:
        kept = http.post("/v1/steering", json={"name": "happy", "path": str(path)})
        assert kept.json() == {"name": "happy", "activations": [STREAM]}
        vectors = [{"name": STREAM, "vector": npy(VECTOR), "scale": 3.0}]
        assert http.post("/v1/steering", json={"name": "3", "vectors": vectors}).status_code == 200
        http.post("/v1/steering", json={"name": "a/b", "vectors": vectors})
        assert http.delete("/v1/steering/a%2Fb").json()["name"] == "a/b"
        listed = http.get("/v1/steering").json()
        assert [item["name"] for item in listed] == ["happy", "3"]
        by_hand = {"name": STREAM, "vector": VECTOR.tolist(), "scale": 1.5}
        expected = choice(running, steer=[by_hand])["token_ids"]
        assert expected != choice(running)["token_ids"]
        for name, scale in (("happy", 1.5), ("3", 0.5)):
            found = choice(running, steer=[{"steering": name, "scale": scale}])
            assert found["token_ids"] == expected
        assert http.delete("/v1/steering/happy").json() == kept.json()
        gone = http.delete("/v1/steering/happy")
        assert gone.status_code == 404
        answer = post(running, **TOKENS, steer=[{"steering": "happy"}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "steer")
        assert "there is no steering vector 'happy'; allowed: 3" in answer.text


MESSAGE = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
STEER = {"name": STREAM, "vector": VECTOR.tolist()}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"capture": ["decoder.1.xx"]}, "capture", "did you mean 'decoder.1.x'"),
        ({"capture": [STREAM], "stream": True}, "capture", "activations are not streamed"),
        ({"capture_format": "npy"}, "capture_format", "it needs capture"),
        ({"steer": [STEER | {"vector": [1, 2]}]}, "steer", "has shape [2]; a token's is [64]"),
        ({"steer": [STEER | {"vector": [[1], [1, 2]]}]}, "steer.0.vector", "the same length"),
        ({"steer": [STEER | {"vector": ["x"]}]}, "steer.0.vector", "give numbers"),
        ({"steer": [STEER | {"vector": {"npy": "x!"}}]}, "steer.0.vector.npy", "not base64"),
        ({"steer": [STEER | {"vector": {"npy": "eHg="}}]}, "steer.0.vector.npy", "not a .npy file"),
        (
            {"steer": [STEER | {"vector": npy(np.array([{}], object))}]},
            "steer.0.vector.npy",
            "the .npy file has |O; write C-ordered float32",
        ),
        ({"steer": [STEER | {"steering": "x"}]}, "steer.0", "not both"),
        ({"steer": [{"name": STREAM}]}, "steer.0", "give name and vector, or steering"),
        ({"steer": [STEER | {"tokens": [1]}]}, "steer.0.tokens", "a range of tokens is [start"),
        (
            {"edits": [{"name": STREAM, "operation": "project_out", "value": 0}]},
            "edits",
            "project_out needs a direction",
        ),
    ],
)
def test_errors(running: Running, body: dict[str, Any], param: str, said: str) -> None:
    error = post(running, **TOKENS | body).json()["error"]
    assert (error["param"], said in error["message"]) == (param, True), error


def test_a_file_that_claims_to_be_large(running: Running) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    )
    vector = {"npy": base64.b64encode(file.getvalue()).decode()}
    error = post(running, **TOKENS, steer=[STEER | {"vector": vector}]).json()["error"]
    assert "does not match its shape" in error["message"]


def test_bytes_are_bounded(running: Running) -> None:
    service = running.service
    few = replace(service.settings, inspection_bytes=64 * 4 * 44)
    object.__setattr__(service, "settings", few)
    try:
        assert choice(running, capture=[STREAM])["captured"][STREAM]["shape"] == [44, 64]
        error = post(running, **TOKENS | {"max_tokens": 6}, capture=[STREAM]).json()["error"]
        assert "11520 bytes of activations would be captured" in error["message"]
        vectors = [{"name": STREAM, "vector": VECTOR.tolist()}] * 45
        kept = post(running, "/v1/steering", name="many", vectors=vectors).json()["error"]
        assert "steering vectors may take 11264 bytes" in kept["message"]
    finally:
        object.__setattr__(service, "settings", SETTINGS)


def test_inspection_is_off_by_default(running: Running) -> None:
    service = running.service
    object.__setattr__(service, "settings", replace(SETTINGS, allow_inspection=False))
    try:
        answers = [
            post(running, **TOKENS, capture=[STREAM]),
            post(running, **TOKENS, steer=[STEER]),
            post(running, "/v1/messages", **MESSAGE, max_tokens=2, steer=[STEER]),
            post(running, "/v1/steering", name="x", vectors=[STEER]),
        ]
        with running.client() as http:
            answers += [http.get("/v1/steering"), http.delete("/v1/steering/x")]
        for answer in answers:
            assert (answer.status_code, "--allow-inspection" in answer.text) == (403, True)
        assert post(running, **TOKENS).status_code == 200
    finally:
        object.__setattr__(service, "settings", SETTINGS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/completion", {"prompt": PROMPTS[0]}),
        ("/", {"text": "x", "is_streaming_mode": False}),
    ],
)
def test_routes_that_show_none(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = post(running, path, **body, capture=[STREAM])
    assert "use /v1/completions" in answer.text
