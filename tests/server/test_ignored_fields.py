"""Fields without effect are reported in a header and in the log, or rejected."""

import json
import logging
import time
from typing import Any

import pytest

from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.sampling_fields import FOREIGN_FIELDS
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.request_body import HEADER, MAX_NAMED, ignored_fields, validated
from jinfer.server.openai.completions import CompletionRequest
from tests.server.running import Running
from tools import peer_fields_reference

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    RESPONSES: {"input": "Hello", "max_output_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "Hello"}]},
}
KWARGS = {"chat_template_kwargs": {"enable_thinking": False}}
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning_effort": "medium"}, "reasoning_effort"),
    (CHAT, KWARGS, "chat_template_kwargs.enable_thinking"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"verbose": True, "stream": True}, "verbose"),
    (CHAT, {"model": "gpt-3.5-turbo"}, "model"),
    (CHAT, {"model": ""}, "model"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include.0"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
     "tools.0.format"),
    (RESPONSES, {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]},
     "input.1.type"),
    (RESPONSES, {"client_metadata": {"a": "b"}}, "client_metadata"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    (RESPONSES, KWARGS, "chat_template_kwargs.enable_thinking"),
    (RESPONSES, {"model": "gpt-4o"}, "model"),
    ("/v1/completions", {"model": "gpt-3.5-turbo"}, "model"),
    ("/apply-template", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/tokenize", KWARGS, "chat_template_kwargs.enable_thinking"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "name"), FIELDS)
def test_a_field_that_changes_nothing(
    smol: Running, path: str, change: dict[str, Any], name: str, caplog: Any
) -> None:
    def logged() -> list[Any]:
        return [record.ignored for record in caplog.records if hasattr(record, "ignored")]

    with caplog.at_level(logging.INFO, "jinfer.access"), smol.client() as http:
        answer = http.post(path, json=BODIES[path] | change)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == name
        # The line follows the answer.
        end = time.monotonic() + 10
        while not logged() and time.monotonic() < end:
            time.sleep(0.01)
    assert logged() == [[name]]


@pytest.mark.parametrize(("path", "change", "name"), FIELDS)
def test_the_same_where_the_service_is_strict(
    strict: Running, path: str, change: dict[str, Any], name: str
) -> None:
    with strict.client() as http:
        answer = http.post(path, json=BODIES[path] | change)
    error = answer.json()["error"]
    assert error["param"] == name
    assert answer.status_code == (404 if name == "model" else 400)
    assert error["code"] == ("model_not_found" if name == "model" else "not_supported")


OTHERS = [*FOREIGN_FIELDS, "moderation", "prompt_cache_options", "parse_tool_calls"]
CHANGE = json.loads("""{
    "backend_sampling": false, "parse_tool_calls": false, "spaces_between_special_tokens": false,
    "return_token_offsets": true, "grammar_lazy": true, "watermarking": true, "echo": true,
    "add_special_tokens": true, "request_id": "a", "session_id": "a", "cache_salt": "a",
    "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}, "moderation": {"a": 1},
    "prompt_cache_options": {"a": 1}, "grammar_triggers": ["a"], "preserved_tokens": ["a"],
    "functions": [{}], "function_call": {}, "reasoning_format": "none"
}""")
DEFAULTS = json.loads("""{
    "id_slot": -1, "n_cache_reuse": 0, "n_keep": -1, "adaptive_target": -1, "echo": false,
    "grammar_triggers": [], "reasoning_format": "auto", "functions": [], "cache_salt": null,
    "watermarking": false, "function_call": "none", "stream_interval": 1, "min_keep": 0
}""")


def test_fields_of_others() -> None:
    """Fields of llama.cpp and vLLM are ignored or rejected by name."""
    rejected = ["echo", "add_special_tokens", "reasoning_format", "functions", "function_call"]
    for name in [*OTHERS, *rejected]:
        if name == "return_mm_kwargs":  # whether true or false
            continue
        body = BODIES[CHAT] | {name: CHANGE.get(name, 5)}
        handling = peer_fields_reference.treatment(CHAT, name)
        if handling.startswith("ignored"):
            assert [item for item, _ in ignored_fields(validated(body, ChatRequest))] == [name]
            continue
        assert handling.startswith("rejected"), name
        with pytest.raises(ApiError) as found:
            validated(body, ChatRequest)
        assert found.value.param == name
    for name, value in DEFAULTS.items():
        assert not list(ignored_fields(validated(BODIES[CHAT] | {name: value}, ChatRequest)))
    with pytest.raises(ApiError, match="prompts must be texts or token ids"):
        validated({"prompt": "a", "prompt_embeds": "b"}, CompletionRequest)


def test_verbose(smol: Running) -> None:
    more = {"verbose": True, "return_prompt_text": True}
    with smol.client() as http:
        answer = http.post(CHAT, json=BODIES[CHAT] | more).json()
        native = answer["__verbose"]
        assert native["content"] == answer["choices"][0]["message"]["content"]
        assert native["prompt"] == answer["prompt_text"]
        assert "Hello" in native["prompt"]
        assert native["generation_settings"]["n_predict"] == 1
        text = http.post("/v1/completions", json=BODIES["/v1/completions"] | {"verbose": True})
        assert text.json()["__verbose"]["prompt"] == "a"
        pieces = http.post(CHAT, json=BODIES[CHAT] | {"return_prompt_text": True, "stream": True})
        assert json.loads(pieces.text.split("\n")[0][6:])["prompt_text"] == native["prompt"]


def test_ignored_names_are_bounded(smol: Running) -> None:
    """Names that a client chose are no way to write headers."""
    names = {f"a\r\nset-cookie: {i} é{'x' * 300}": 1 for i in range(100)}
    with smol.client() as http:
        answer = http.post(CHAT, json=BODIES[CHAT] | {"chat_template_kwargs": names})
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
        told = answer.headers[HEADER].split(", ")
        assert len(told) == MAX_NAMED
        assert told[0].startswith("chat_template_kwargs.a??set-cookie:?0")
        assert HEADER not in http.post(CHAT, json=BODIES[CHAT]).headers


def test_kwargs_reach_the_template_of_a_response(smol: Running) -> None:
    from jinfer.server.openai.response_input import ResponseInput, to_chat_request
    from jinfer.server.openai.response_schemas import InputItem, ResponseRequest

    given = {**BODIES[RESPONSES], **KWARGS, "top_k": 5, "seed": 1.0}
    body = ResponseRequest.model_validate(given)
    hello = InputItem.model_validate({"role": "user", "content": "Hello"})
    chat = to_chat_request(body, ResponseInput([], [hello]), lambda field, why: None)
    assert chat.chat_template_kwargs == KWARGS["chat_template_kwargs"]
    sent = chat.given_fields()
    assert (sent["top_k"], sent["seed"], sent["max_completion_tokens"]) == (5, 1, 1)


def test_other_tools_leave_functions_alone(smol: Running) -> None:
    tool = {"type": "function", "name": "f"}
    tools = {"tools": [{"type": "web_search", "filters": {}}, tool]}
    with smol.client() as http:
        answer = http.post(RESPONSES, json=BODIES[RESPONSES] | tools)
        assert [item["name"] for item in answer.json()["tools"]] == ["f"]
        wrong = {"tools": [{"type": "web_search"}, {**tool, "name": "a b"}]}
        error = http.post(RESPONSES, json=BODIES[RESPONSES] | wrong).json()["error"]
        assert error["param"] == "tools.1.name"


def test_several_models_have_names() -> None:
    from jinfer.server.http.server_settings import ModelSource, ServerSettings
    from jinfer.server.models.model_manager import ModelManager
    from jinfer.server.models.model_registry import ModelRegistry

    def manager(*sources: ModelSource, strict: bool = False) -> ModelManager:
        return ModelManager(ModelRegistry(sources), ServerSettings(strict=strict))

    one, two = ModelSource("a", "x"), ModelSource("b", "y")
    assert manager(one).answers_to("gpt")
    assert not manager(one).answers_to("a")
    assert not manager(one, strict=True).answers_to("gpt")
    assert not manager(one, two).answers_to("gpt")
