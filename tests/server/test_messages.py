"""Messages, as the package anthropic and a coding agent ask for them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from jinfer.loader.open_model import open_files
from jinfer.server.http.request_body import HEADER
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.server.running import SMOL, Running, serving
from tests.server.test_description import schema_of
from tests.server.tool_models import CHATML
from tools.bench_models import LlamaShape, make_up

ANSWER = "Hello! How can I assist you today?"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
MESSAGES, KEY = "/v1/messages", {"x-api-key": "first"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The demonstration model, and a random model whose template has thoughts."""
    tiny = tmp_path_factory.mktemp("tiny") / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights
    make_up(LlamaShape(2, 64, 4, 2, 96, context=4096), words, tiny, "Q8_0")
    prompt = {"chat_template": CHATML + "{# </think> #}"}
    own = {**SMOL.overrides, "prompt": prompt, "engine": {"slots": 4}}
    settings = ServerSettings(keys=("first", "second"), warm_up=False)
    with serving([SMOL, ModelSource("tiny", str(tiny), own)], settings) as running:
        yield running
        for model in running.service.models.models:
            assert running.holds_nothing(model.name)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    given: dict[str, Any] = {"base_url": running.url, "api_key": "first", "max_retries": 0}
    with anthropic.Anthropic(**given) as client:
        yield client


def create(client: anthropic.Anthropic, **changes: Any) -> Any:
    """A message, by default of the demonstration model."""
    given = {"model": "smol", "messages": HELLO, "max_tokens": 30}
    more = {"temperature": 0, **changes.pop("extra_body", {})}
    return client.messages.create(**{**given, **changes}, extra_body=more)


def post(running: Running, path: str = MESSAGES, **body: Any) -> httpx.Response:
    given = {"model": "smol", "messages": HELLO, "max_tokens": 3} | body
    return httpx.post(running.url + path, json=given, headers=KEY, timeout=60)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    events = []
    for item in text.strip().split("\n\n"):
        if item.startswith(":"):
            continue  # a comment, before the model is there
        name, data = item.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_an_answer(client: anthropic.Anthropic, running: Running) -> None:
    for cached in (0, 30):
        answer = create(client)
        assert [(item.type, item.text) for item in answer.content] == [("text", ANSWER)]
        assert answer.id.startswith("msg_")
        assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
            "assistant",
            "end_turn",
            None,
        )
        used = answer.usage
        assert (used.input_tokens, used.cache_read_input_tokens) == (31 - cached, cached)
        assert used.output_tokens == 10
    jsonschema.validate(post(running).json(), schema_of(MESSAGES, "post"))
    counted = post(running, f"{MESSAGES}/count_tokens", max_tokens=None)
    assert counted.json() == {"input_tokens": 31}


def test_a_stream(client: anthropic.Anthropic, running: Running) -> None:
    kinds = [event.type for event in create(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    given: dict[str, Any] = {"model": "smol", "messages": HELLO, "max_tokens": 30}
    with client.messages.stream(**given, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    whole = create(client)
    assert final.content[0].model_dump()["text"] == ANSWER
    assert (final.usage, final.stop_reason) == (whole.usage, "end_turn")
    first, *_, last, end = events_of(post(running, max_tokens=9, temperature=0, stream=True).text)
    assert first["message"]["content"] == []
    assert first["message"]["usage"]["cache_read_input_tokens"] == 30
    assert last["delta"]["stop_reason"] == "max_tokens"
    assert (last["usage"]["output_tokens"], end) == (9, {"type": "message_stop"})


def test_where_an_answer_ends(client: anthropic.Anthropic, running: Running) -> None:
    answer = create(client, stop_sequences=["today", "assist"])
    assert answer.content[0].text == "Hello! How can I "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "assist")
    events = events_of(post(running, stop_sequences=["!"], temperature=0, stream=True).text)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "!"}
    assert create(client, max_tokens=2).stop_reason == "max_tokens"
    none = create(client, max_tokens=0)
    assert (none.content, none.stop_reason, none.usage.output_tokens) == ([], "max_tokens", 0)
    long = [{"role": "user", "content": "word " * 5000}]
    full = create(client, model="tiny", messages=long, extra_body={"truncate_prompt_tokens": -1})
    assert (full.stop_reason, full.usage.output_tokens) == ("model_context_window_exceeded", 1)


def test_an_answer_that_is_begun(client: anthropic.Anthropic) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hello! How"}]}]
    assert create(client, messages=begun).content[0].text == ANSWER.removeprefix("Hello! How")


def test_json(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    format = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for given in ({"output_config": {"format": format}}, {"output_format": format}):
        answer = create(client, extra_body=given)
        assert json.loads(answer.content[0].text)["a"] in (1, 2)


def test_calls(client: anthropic.Anthropic, running: Running) -> None:
    named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    given: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": named, "max_tokens": 200}
    answer = create(client, **given)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Paris", "Rome")
    pieces = list(create(client, **given, stream=True))
    said = [piece.delta.partial_json for piece in pieces if piece.type == "content_block_delta"]
    assert len(said) > 1
    assert json.loads("".join(said)) == call.input
    assert pieces[-2].delta.stop_reason == "tool_use"
    # The whole loop: the call and its result, given back as they came.
    again = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21"}],
        },
    ]
    assert create(client, messages=again, tools=[WEATHER]).content[0].type == "text"
    any_ = create(client, **{**given, "tool_choice": {"type": "any"}, "model": "tiny"})
    assert {item.type for item in any_.content} == {"tool_use"}
    cut = create(client, **{**given, "max_tokens": 12})
    assert cut.stop_reason == "max_tokens"


def turn(city: str) -> list[Any]:
    """A question that was answered with a call."""
    call = {"type": "tool_use", "id": city, "name": "weather", "input": {"city": city}}
    result = {"type": "tool_result", "tool_use_id": city, "content": "Sunny."}
    return [
        {"role": "user", "content": f"What is the weather like in {city}?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is sunny."},
    ]


def test_calls_that_nothing_binds_come_whole(running: Running) -> None:
    """Clients would run what was no call after all; until that is known, events tell of life."""
    asked = [*turn("Paris"), *turn("Rome"), *turn("Paris"), *turn("Rome")[:1]]
    given: dict[str, Any] = {
        "messages": asked,
        "tools": [WEATHER, NOW],
        "max_tokens": 60,
        "temperature": 0,
    }
    settings = running.service.settings
    usual, pieces = settings.ping, []
    object.__setattr__(settings, "ping", 1e-4)
    try:
        for eager in (False, True):
            tools = [{**WEATHER, "eager_input_streaming": eager}, NOW]
            events = events_of(post(running, **{**given, "tools": tools}, stream=True).text)
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            pieces.append([delta["partial_json"] for delta in deltas])
            assert events[-2]["delta"]["stop_reason"] == "tool_use"
            kinds = [event["type"] for event in events]
            begun, ended = map(kinds.index, ("content_block_start", "content_block_stop"))
            # Pieces that follow one another sooner than a ping is due have none between them.
            assert eager or "ping" not in kinds[begun:ended]
            assert "ping" in kinds[:begun]
    finally:
        object.__setattr__(settings, "ping", usual)
    assert "".join(pieces[0]) == "".join(pieces[1])
    assert json.loads("".join(pieces[0])) == {"city": "Rome"}
    call = post(running, **given).json()["content"][-1]
    assert (call["type"], call["input"]) == ("tool_use", {"city": "Rome"})


def test_thoughts(client: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {
        "model": "tiny",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = create(client, **given, max_tokens=12)
    (thought,) = answer.content
    assert thought.type == "thinking"
    assert thought.thinking
    assert thought.signature
    with client.messages.stream(
        **given, messages=HELLO, max_tokens=12, extra_body={"temperature": 0}
    ) as stream:
        assert stream.get_final_message().content[0].model_dump() == thought.model_dump()
    off = create(client, model="tiny", thinking={"type": "disabled"}, max_tokens=3)
    assert [item.type for item in off.content] == ["text"]
    again = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
    assert create(client, **given, messages=again, max_tokens=1).usage.output_tokens == 1


BLOCK: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": "https://x"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}
CALL: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
PDF: dict[str, Any] = {"type": "document", "source": {"type": "base64", "data": "JVBE"}}


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [BLOCK]}]}, "messages.0.content.0.source: "),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.source: "),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "messages.0.content.0: the model"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0: "),
        ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x: unknown field"),
        ({"unheard": 1}, "unheard: unknown field"),
        ({"temperature": -1}, "temperature: "),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop_sequences: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: "),
        ({"tools": [{**NOW, "input_schema": {"properties": {"a": {"type": "no"}}}}],
          "tool_choice": {"type": "any"}}, "tools.0.input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
         "output_config.format: "),
        ({"n": 2}, "n: "),
        ({"return_token_ids": True}, "return_token_ids: "),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages: This model's"),
    ],
)  # fmt: skip
def test_what_is_refused(running: Running, change: dict[str, Any], begins: str) -> None:
    answer = post(running, **change)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert set(error) == {"type", "error"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(begins)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"service_tier": "priority"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"thinking": {"type": "enabled"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{**NOW, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a", "id": "msg_1"}, *HELLO]},
         "messages.1.id"),
        ({"betas": ["a"], "anthropic_version": "b"}, "betas, anthropic_version"),
        ({"inference_geo": "eu", "fallbacks": "x"}, "inference_geo, fallbacks"),
        ({"service_tier": "auto", "speed": "standard", "cache_control": {"type": "ephemeral"},
          "metadata": {"user_id": "ada"}}, None),
    ],
)  # fmt: skip
def test_a_message_field_that_changes_nothing(
    running: Running, change: dict[str, Any], name: str | None
) -> None:
    answer = post(running, **change)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == name


def test_keys_of_anthropic(running: Running, client: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {"base_url": running.url, "max_retries": 0}
    with anthropic.Anthropic(auth_token="second", **given) as other:
        assert create(other, max_tokens=1).usage.output_tokens == 1
    with (
        anthropic.Anthropic(api_key="wrong", **given) as other,
        pytest.raises(anthropic.AuthenticationError) as found,
    ):
        create(other)
    error: Any = found.value.body
    assert error["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, model="claude")
    body: Any = missing.value.body
    assert body["error"]["message"].startswith("model: there is no model 'claude'")
    got = httpx.get(running.url + MESSAGES, headers=KEY)
    assert (got.status_code, got.json()["type"]) == (405, "error")


def test_a_coding_agent(running: Running) -> None:
    """A session as an agent sends it: 20 tools, parts, thoughts and results given back."""
    session = json.loads((Path(__file__).parent / "coding_agent.json").read_text())
    assert len(session["shared"]["tools"]) == 20
    ignored = ["messages.5.content.0.type", "output_config.effort", "context_management"]
    cached = 0
    for item in session["requests"]:
        body = {k: session["shared"][k] if v == "shared" else v for k, v in item["body"].items()}
        if isinstance(body["messages"], int):
            body["messages"] = session["messages"][: body["messages"]]
        body["model"] = "tiny"
        if "count_tokens" not in item["path"]:
            body["max_tokens"] = min(body["max_tokens"], 4)
        headers = {**KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        answer = httpx.post(running.url + item["path"], json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert set(filter(None, answer.headers.get(HEADER, "").split(", "))) <= set(ignored)
        if body.get("stream"):
            *_, last, end = events_of(answer.text)
            assert (last["type"], end["type"]) == ("message_delta", "message_stop")
            used = last["usage"]
            assert used["output_tokens"] == 4
            if "tools" in body:
                # What the last turn had computed is not computed again.
                assert used["cache_read_input_tokens"] >= cached
                cached = used["input_tokens"] + used["cache_read_input_tokens"] - 64
    assert cached > 1000
