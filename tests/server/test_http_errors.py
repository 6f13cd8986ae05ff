"""Invalid requests are answered in OpenAI's format, never with a 500."""

import gzip
import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import Running

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TEXT = {"prompt": "Hello", "max_tokens": 2}


def refused(smol: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of an answer, which has to have that status."""
    with smol.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 2.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"n_predict": 3}, "n_predict"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"hot": True}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, None),
        ({"samplers": ["magic"]}, "samplers"),
        ({"strategy": "magic"}, "strategy"),
        ({"grammar": "start: foo"}, None),
        ({"grammar": "root ::= foo"}, None),
        ({"regex": "("}, None),
        ({"json_schema": {"type": "object", "uniqueItems": True}}, None),
        ({"json_schema": {"type": "nothing"}}, None),
        ({"json_schema": {"type": "object", "minProperties": 2}}, None),
        ({"structured_outputs": {"json": {"type": "object", "minProperties": 2}}}, None),
        ({"response_format": {"type": "json_object", "schema": {"minProperties": 2}}}, None),
        ({"structured_outputs": {"regex": "(x|y)[a&&b]"}}, None),
        ({"grammar": "root ::= [ab] root"}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"timings_per_token": True}, "timings_per_token"),
        ({"stream": True, "stream_options": {"hm": 1}}, "stream_options.hm"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"priority": "high"}, "priority"),
    ],
)
@pytest.mark.parametrize(("path", "base"), [(CHAT, HELLO), ("/v1/completions", TEXT)])
def test_a_field_that_is_wrong(
    smol: Running, path: str, base: dict[str, Any], change: dict[str, Any], param: str | None
) -> None:
    error = refused(smol, path, base | change)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


NAMES_TWICE = {"type": "object", "minProperties": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            HELLO
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": NAMES_TWICE},
                }
            },
        ),
        (CHAT, HELLO | {"structured_outputs": {"json": NAMES_TWICE}}),
        ("/v1/completions", TEXT | {"json_schema": NAMES_TWICE}),
        ("/completion", {"prompt": "Hello", "n_predict": 2, "json_schema": NAMES_TWICE}),
        ("/completion", {"prompt": "Hello", "grammar": f"start: %json {json.dumps(NAMES_TWICE)}"}),
        (
            "/v1/responses",
            {
                "input": "Hello",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": NAMES_TWICE}},
            },
        ),
        ("/api/chat", {"messages": HELLO["messages"], "format": NAMES_TWICE}),
        ("/api/generate", {"prompt": "Hello", "format": NAMES_TWICE}),
    ],
)
def test_every_form_of_a_schema_is_checked_before_the_first_token(
    smol: Running, path: str, body: dict[str, Any], stream: bool
) -> None:
    with smol.client() as http:
        answer = http.post(path, json=body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    assert "minProperties is supported where" in answer.text


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"messages": []}, "messages", 400),
        ({"messages": "Hello"}, "messages", 400),
        ({"messages": [{"role": "user"}]}, "messages.0.content", 400),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", 400),
        ({"messages": [{"role": "user", "content": "a", "b": 1}]}, "messages.0.b", 400),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, 400),
        ({"top_logprobs": 2}, "top_logprobs", 400),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
        ({"chat_template_kwargs": {"special": True}}, "chat_template_kwargs.special", 400),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", 400),
        ({"chat_template": "{{ messages }}"}, "chat_template", 403),
        ({"continue_final_message": True}, "continue_final_message", 400),
        ({"documents": [{"text": "a"}]}, "documents", 400),
        ({"audio": {"voice": "x"}}, "audio", 400),
        ({"modalities": ["audio"]}, "modalities.0", 400),
        ({"verbosity": "chatty"}, "verbosity", 400),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url.url",
            400,
        ),
    ],
)
def test_a_conversation_that_is_wrong(
    smol: Running, change: dict[str, Any], param: str | None, status: int
) -> None:
    error = refused(smol, CHAT, HELLO | change, status)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"prompt": []}, "prompt", 400),
        ({"prompt": [[]]}, "prompt", 400),
        ({"prompt": {"a": 1}}, "prompt", 400),
        ({"prompt": [1, "a"]}, "prompt.1", 400),
        ({"prompt": [999999]}, "prompt", 400),
        ({"logprobs": 21}, "logprobs", 400),
        ({"suffix": "end"}, "suffix", 400),
        ({"echo": True, "stream": True, "logprobs": 1}, "echo", 400),
        ({"best_of": 3, "stream": True}, "best_of", 400),
        ({"prompt_logprobs": 30}, "prompt_logprobs", 400),
    ],
)
def test_a_text_that_is_wrong(
    smol: Running, change: dict[str, Any], param: str | None, status: int
) -> None:
    error = refused(smol, "/v1/completions", TEXT | change, status)
    assert error["param"] == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b"\x00\x01",
        b'{"prompt":' + b"[" * 100_000,
        b"{" * 2000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}",
        b'{"prompt": "a", "json_schema": ' + b'{"items":' * 900 + b"{}" + b"}" * 900 + b"}",
    ],
)
def test_a_body_that_is_no_request(smol: Running, data: bytes) -> None:
    with smol.client() as http:
        answer = http.post("/v1/completions", content=data)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_too_long(smol: Running) -> None:
    for path, body, param in [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
        ("/v1/completions", {"prompt": "word " * 5000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 4096}, "prompt"),
    ]:
        error = refused(smol, path, body)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        # What LiteLLM and LangChain look for.
        assert error["message"].startswith(
            "This model's maximum context length is 4096 tokens, but the prompt has "
        )
        assert "Input tokens exceed the configured limit" in error["message"]


def test_a_body_of_ten_megabytes(smol: Running) -> None:
    error = refused(smol, "/v1/completions", {"prompt": "a" * 10_000_000}, 413)
    assert error["code"] == "body_too_large"
    assert "8388608" in error["message"]

    def parts() -> Any:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 100_000

    with smol.client() as http:  # without a length that says it beforehand
        assert http.post("/v1/completions", content=parts()).status_code == 413


def test_bodies_that_are_compressed(smol: Running) -> None:
    """Also where the header was forgotten."""
    plain = b'{"prompt": "a", "max_tokens": 1}'
    packed = gzip.compress(plain)
    cases = [
        ({"content-encoding": "gzip"}, packed),
        ({"content-encoding": "br"}, b"x"),
        ({}, packed),
    ]
    with smol.client() as http:
        for headers, content in cases:
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 415
            assert answer.headers["accept-encoding"] == "identity"
            error = answer.json()["error"]
            assert error["code"] == "unsupported_encoding"
            assert "Content-Encoding" in error["message"]
        headers = {"content-encoding": "identity"}
        for content in (plain, b"\xef\xbb\xbf" + plain):
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_leave_nothing(smol: Running, stream: bool) -> None:
    """A grammar's only way on is banned; of a stream that has begun, it is the last event."""
    (yes,) = smol.model().llm.session.tokenizer.encode("yes")
    body = {**HELLO, "choice": ["yes"], "banned_token_ids": [yes], "stream": stream}
    with smol.client() as http:
        answer = http.post(CHAT, json=body)
    assert answer.status_code in ((200, 400) if stream else (400,))
    error = json.loads(answer.text.removeprefix("data: "))["error"]
    assert error["param"] == "choice"
    assert "nothing is left: banned_token_ids forbid what has to come next" in error["message"]


def test_a_slash_at_the_end(smol: Running) -> None:
    with smol.client() as http:
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()
        assert http.get("/v1/models/smol/").json()["id"] == "smol"
        answer = http.post("/v1/completions/", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
        assert http.get("/health/").status_code == 200


def test_routes_and_methods(smol: Running) -> None:
    with smol.client() as http:
        answer = http.get("/v1/nothing")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        answer = http.get(CHAT)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert http.head("/health").status_code == 200


def test_typed_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="smol", prompt="a", temperature=-1)
    assert found.value.param == "temperature"


def test_request_ids(smol: Running) -> None:
    with smol.client() as http:
        answer = http.get("/health", headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        for wrong in ("a b", "x" * 200, "a\tb"):
            answer = http.get("/health", headers={"X-Request-Id": wrong})
            assert len(answer.headers["x-request-id"]) == 32
        refused_ = httpx.post(f"{smol.url}{CHAT}", headers={"X-Request-Id": "mine-2"})
        assert refused_.headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize(
    ("path", "base"), [(CHAT, HELLO), ("/v1/responses", {"input": "a", "max_output_tokens": 2})]
)
def test_what_is_taken_and_changes_nothing(smol: Running, path: str, base: dict[str, Any]) -> None:
    more = {"service_tier": "auto", "prompt_cache_key": "a", "metadata": {"a": "b"}, "store": False}
    more |= {"prompt_cache_retention": "24h"}
    chat = {"modalities": ["text"], "verbosity": "medium", "audio": None, "safety_identifier": "u"}
    with smol.client() as http:
        answer = http.post(path, json=base | more | (chat if path == CHAT else {"user": "u"}))
    assert answer.status_code == 200, answer.text
    assert "x-jinfer-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": [7] * 300_000}, 413, None),
        ("/v1/completions", {"prompt": [7, "a"] * 100_000}, 400, "prompt.1"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 9000}, 400, "messages"),
        (CHAT, {**HELLO, **{f"a{i}": 0 for i in range(100_000)}}, 400, "a0"),
        ("/v1/embeddings", {"input": ["a", 7] * 100_000}, 400, "input"),
    ],
    ids=["values", "kinds", "messages", "fields", "texts"],
)
def test_what_would_take_long_to_refuse(
    smol: Running, path: str, body: Any, status: int, param: str | None
) -> None:
    """A list with an error for each of many wrong values would take too long."""
    assert refused(smol, path, body, status)["param"] == param


@pytest.mark.parametrize("end", [b'"', b'"' + b'\\",' * 500_000, b'"' + b"a," * 500_000])
def test_a_text_that_never_ends(smol: Running, end: bytes) -> None:
    """No time is lost with looking for where it might begin instead."""
    data = b'{"prompt": ["a' + b"," * 300_000 + b'", ' + end
    with smol.client() as http:
        answer = http.post("/v1/completions", content=data)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_commas_in_texts_are_no_values(smol: Running) -> None:
    words = 'a, "b\\", ' * 100_000
    error = refused(smol, "/v1/completions", {"prompt": words, "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "field", "value", "why"),
    [
        ("/v1/responses", "previous_response_id", "r", "send the whole conversation as input"),
        ("/v1/responses", "conversation", {"id": "c"}, "use previous_response_id"),
        ("/v1/chat/completions", "audio", {"voice": "x"}, "text only"),
        ("/completion", "min_keep", False, "min_keep: samplers have no minimum"),
    ],
)
def test_a_field_without_a_value_says_why(
    smol: Running, path: str, field: str, value: Any, why: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    bodies = {"/v1/responses": {"input": "a"}, "/completion": {"prompt": "a"}}
    with smol.client() as http:
        error = http.post(path, json=bodies.get(path, chat) | {field: value}).json()["error"]
    assert error["param"] == field
    assert why in error["message"]
    assert "Value error" not in error["message"]
