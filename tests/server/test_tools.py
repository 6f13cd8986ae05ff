"""Tools, through openai-python, with the demonstration model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jinfer.server.tool_parsers import call_format as tool_format
from tests.server.running import Running
from tests.server.tool_models import (
    ASKED,
    CHATML,
    NOW,
    WEATHER,
    TemplateOf,
    arguments_of,
    create,
    serving_templates,
)

TEMPLATES: list[TemplateOf] = [
    ("hermes", CHATML, {}),
    ("mistral", CHATML + "{# [TOOL_CALLS] [ARGS] #}", {}),
    ("llama", CHATML.replace("<tool_call>\n", "<|python_tag|>").replace("</tool_call>", ""), {}),
    ("smol", None, {}),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_templates(tmp_path_factory.mktemp("tiny"), TEMPLATES) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "smol"])
def test_a_call_that_has_to_come(client: openai.OpenAI, name: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in ((named, {"weather"}), ("required", {"weather", "now"})):
        answer = create(client, model=name, tool_choice=choice, parallel_tool_calls=False)
        (choice_,) = answer.choices
        assert choice_.finish_reason == "tool_calls"
        assert choice_.message.content is None
        (call,) = choice_.message.tool_calls
        assert call.type == "function"
        assert len(call.id) == 9 if name == "mistral" else call.id.startswith("call_")
        assert call.function.name in names
        arguments_of(call)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "smol"])
def test_calls_stream(client: openai.OpenAI, name: str) -> None:
    given = {"model": name, "tool_choice": "required", "parallel_tool_calls": False}
    whole = create(client, **given)
    chunks = list(create(client, **given, stream=True))
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or ():
            if piece.index not in calls:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
            else:
                assert piece.id is None
                assert piece.function.name is None
            calls[piece.index]["arguments"] += piece.function.arguments
        assert chunk.choices[0].delta.content in (None, "")
    expected = whole.choices[0].message.tool_calls
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        (item.function.name, item.function.arguments) for item in expected
    ]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len({call["id"] for call in calls.values()}) == len(calls)


def test_the_helper_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="hermes", messages=ASKED, tools=[WEATHER], tool_choice="required",  # type: ignore[list-item]
        parallel_tool_calls=False, temperature=0, max_tokens=200,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    arguments_of(calls[0])


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama"])
def test_a_call_that_the_limit_cuts(client: openai.OpenAI, name: str) -> None:
    given = {"model": name, "tools": [WEATHER], "tool_choice": "required"}
    for tokens in range(1, 22, 4):
        (choice,) = create(client, **given, max_tokens=tokens).choices
        assert choice.finish_reason == "length"
        assert not choice.message.content
        chunks = list(create(client, **given, max_tokens=tokens, stream=True))
        pieces = [p for chunk in chunks for p in chunk.choices[0].delta.tool_calls or ()]
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
        arguments = "".join(piece.function.arguments for piece in pieces)
        found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        assert found == ([("weather", arguments)] if pieces else [])
        assert not arguments or arguments.startswith("{")
    assert found


def test_a_response_that_the_limit_cuts_in_a_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    asked: dict[str, Any] = {
        "input": "Weather?",
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 0,
    }
    for tokens, said in ((4, False), (20, True)):
        answer = client.responses.create(model="hermes", max_output_tokens=tokens, **asked)
        assert answer.status == "incomplete"
        assert not answer.output_text
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [(call.name, call.status) for call in calls] == [("weather", "incomplete")] * said


@pytest.mark.parametrize(
    ("most", "tokens"),
    [(3, 300), pytest.param(tool_format.MAX_CALLS, 1000, marks=pytest.mark.soak)],
)
def test_parallel_calls(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, most: int, tokens: int
) -> None:
    # Without an end of sequence, it has to go on with calls, as long as it may.
    monkeypatch.setattr(tool_format, "MAX_CALLS", most)
    ends = {2: -100.0, 0: -100.0}
    given = {"tool_choice": "required", "logit_bias": ends, "seed": 1, "temperature": 1.0}
    answer = create(client, **given, max_tokens=tokens)
    calls = answer.choices[0].message.tool_calls
    assert 1 < len(calls) <= most
    for call in calls:
        arguments_of(call)
    assert len({call.id for call in calls}) == len(calls)
    alone = create(client, **given, parallel_tool_calls=False)
    assert len(alone.choices[0].message.tool_calls) == 1


def turn(city: str) -> list[Any]:
    """A question, the call that it led to, and its answer."""
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What is the weather like in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "It rains."},
        {"role": "assistant", "content": "It rains."},
    ]


def test_the_model_may_call_or_not(client: openai.OpenAI) -> None:
    # It has seen how, and goes on as it began.
    asked = [*turn("Paris"), *turn("Rome"), *turn("Paris"), *ASKED]
    (choice,) = create(client, messages=asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [arguments_of(call) for call in choice.message.tool_calls] == [{"city": "Rome"}]
    chunks = list(create(client, messages=asked, stream=True))
    pieces = [p for chunk in chunks for p in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "weather"
    assert len(pieces) > 2
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Rome"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # Without leave to, it says the same in words; cut short, it is a call all the same.
    (choice,) = create(client, messages=asked, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
    assert choice.finish_reason == "stop"
    for tokens, text in ((3, None), (16, '{"')):
        (choice,) = create(client, messages=asked, max_tokens=tokens).choices
        assert not choice.message.content
        assert (choice.message.tool_calls is None) == (text is None)
        assert choice.finish_reason == "length"
        for call in choice.message.tool_calls or ():
            assert call.function.name == "weather"
            assert '{"city": "Rome"}'.startswith(call.function.arguments)
            assert call.function.arguments.startswith(text or "")
    hello = create(client, messages=[{"role": "user", "content": "Hello"}]).choices[0]
    assert hello.message.tool_calls is None
    assert hello.message.content
    assert hello.finish_reason == "stop"


def test_earlier_calls_reach_the_model(client: openai.OpenAI, running: Running) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]
    for name in ("hermes", "smol"):
        answer = create(client, model=name, messages=messages, tools=[WEATHER], max_tokens=20)
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        body = {"model": name, "messages": messages, "tools": [WEATHER]}
        prompt = httpx.post(f"{running.url}/apply-template", json=body).json()["prompt"]
        assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
        assert "It rains." in prompt
        assert "The weather of a city." in prompt


def test_a_response_with_calls(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    given: dict[str, Any] = {
        "model": "hermes",
        "input": "What is the weather like in Rome?",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 0,
    }
    answer = client.responses.create(**given)
    (item,) = answer.output
    assert item.type == "function_call"
    assert item.status == "completed"
    assert item.name == "weather"
    assert json.loads(item.arguments)["city"] in ("Paris", "Rome")
    events = list(client.responses.create(**given, stream=True))
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == 1
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item.arguments
    assert len(deltas) > 1
    assert kinds[-1] == "response.completed"
    # And on with what it gave.
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "It rains."}
    call = {k: v for k, v in item.model_dump().items() if k in _CALL}
    more: list[Any] = [{"role": "user", "content": given["input"]}, call, result]
    after = client.responses.create(
        model="hermes", input=more, tools=[tool], temperature=0, max_output_tokens=20
    )
    assert after.output_text or after.output[0].type == "function_call"


_CALL = ("type", "call_id", "name", "arguments")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                    "properties": {"a": {"type": "strange"}}}}}],
            },
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "required", "grammar": 'root ::= "a"'}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_is_refused(running: Running, change: dict[str, Any], param: str) -> None:
    body = {"model": "hermes", "messages": ASKED, "tools": [WEATHER, NOW], **change}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
