"""Tools and thoughts, as openai-python asks for them, answered by the demonstration model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jinfer.opening.open_model import open_files
from jinfer.server.server_settings import ModelSource
from jinfer.server.tool_parsers import call_format as tool_format
from tests.server.running import SMOL, Running, serving
from tools.bench_models import LlamaShape, make_up

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


LLAMA = CHATML.replace("<tool_call>\n", "<|python_tag|>").replace("</tool_call>", "")


def models(tiny: str) -> Iterator[ModelSource]:
    """The demonstration model where it has to know something; one of random weights where not."""
    for name, path, template, own in (
        ("hermes", SMOL.path, CHATML, {}),
        ("mistral", tiny, CHATML + "{# [TOOL_CALLS] [ARGS] #}", {}),
        ("llama", tiny, LLAMA, {}),
        ("thinking", tiny, CHATML + "{# </think> #}", {}),
        ("always", tiny, CHATML.replace("enable_thinking", "true"), {"reasoning": "think"}),
    ):
        prompt = {"chat_template": template, **own}
        yield ModelSource(name, path, {**SMOL.overrides, "prompt": prompt, "engine": {"slots": 4}})
    yield ModelSource("smol", tiny, {**SMOL.overrides, "engine": {"slots": 4}})


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather like in Rome?"}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tiny = tmp_path_factory.mktemp("tiny") / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights  # and its chat template
    make_up(LlamaShape(2, 64, 4, 2, 96, context=4096), words, tiny, "Q8_0")
    with serving(list(models(str(tiny)))) as running:
        yield running
        for one in running.service.models.models:
            assert running.holds_nothing(one.name)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **changes: Any) -> Any:
    """A chat completion of these tools."""
    given = {"model": "hermes", "messages": ASKED, "tools": [WEATHER, NOW], "temperature": 0}
    return client.chat.completions.create(**{**given, "max_tokens": 200, **changes})


def arguments_of(call: Any) -> Any:
    """What a call's arguments say, which have to fit its tool."""
    said = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(said) == {"city"}
        assert said["city"] in ("Paris", "Rome")
    else:
        assert (call.function.name, said) == ("now", {})
    return said


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
    assert [(one["name"], one["arguments"]) for one in calls.values()] == [
        (one.function.name, one.function.arguments) for one in expected
    ]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len({one["id"] for one in calls.values()}) == len(calls)


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
        pieces = [p for one in chunks for p in one.choices[0].delta.tool_calls or ()]
        assert not any(one.choices[0].delta.content for one in chunks)
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
        assert [(one.name, one.status) for one in calls] == [("weather", "incomplete")] * said


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
    pieces = [p for one in chunks for p in one.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "weather"
    assert len(pieces) > 2
    assert json.loads("".join(one.function.arguments for one in pieces)) == {"city": "Rome"}
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


def test_thoughts(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    given = {"model": "thinking", "tools": openai.NOT_GIVEN, "max_tokens": 12}
    open_ = create(client, **given, extra_body=thinking).choices[0].message
    assert open_.model_extra["reasoning_content"]
    assert open_.content == ""
    plain = create(client, **given).choices[0].message
    assert "reasoning_content" not in (plain.model_extra or {})
    assert plain.content
    chunks = list(create(client, **given, extra_body=thinking, stream=True))
    pieces = [
        (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in chunks
    ]
    assert "".join(filter(None, pieces)) == open_.model_extra["reasoning_content"]
    # Thoughts stand before JSON, too; a choice is all answer.
    format: Any = {"response_format": {"type": "json_object"}}
    thought = create(client, **given, extra_body=thinking, **format).choices[0].message
    assert thought.model_extra["reasoning_content"]
    messages = [*ASKED, {"role": "assistant", "content": "<think>It is Rome.</think>"}]
    more: dict[str, Any] = {"extra_body": {"continue_final_message": True}, "messages": messages}
    json_ = create(client, **given, **format, **more).choices[0].message
    assert json_.content.startswith("{")
    bound = create(client, **given, extra_body=thinking | {"choice": ["yes", "no"]})
    assert bound.choices[0].message.content in ("yes", "no")


def test_thinking_budgets(client: openai.OpenAI, running: Running) -> None:
    """However a budget is asked for, the thought ends there, and the answer goes on."""
    given = {"model": "always", "tools": openai.NOT_GIVEN, "max_tokens": 20}
    free = create(client, **given).choices[0].message
    assert free.content == ""
    ids = {"return_token_ids": True}
    asked: list[dict[str, Any]] = [
        {"thinking_token_budget": 4},
        {"reasoning_budget_tokens": 4},
        {"reasoning": {"max_tokens": 4}},
        {"thinking": {"type": "auto", "budget_tokens": 4}},
    ]
    for body in asked:
        choice = create(client, **given, extra_body={**body, **ids}).choices[0]
        message, tokens = choice.message, choice.token_ids
        assert free.reasoning_content.startswith(message.reasoning_content)
        assert message.content
        assert len(tokens) == 20
    end = running.hosted("always").session.tokenizer.encode("</think>", special=False)
    assert tokens[4 : 4 + len(end)] == end
    chunks = list(create(client, **given, extra_body=asked[0], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(one.content or "" for one in deltas) == message.content
    # Off, where the template always opens a thought.
    off = {"reasoning_effort": "none", **ids}
    choice = create(client, **given, extra_body=off).choices[0]
    assert choice.token_ids[: len(end)] == end
    assert "reasoning_content" not in (choice.message.model_extra or {})
    # Then a call, or JSON.
    call = create(
        client, model="always", tool_choice="required", max_tokens=60, extra_body=asked[0],
        parallel_tool_calls=False,
    ).choices[0].message  # fmt: skip
    arguments_of(call.tool_calls[0])
    assert call.reasoning_content
    format: Any = {"response_format": {"type": "json_object"}}
    json_ = create(client, **given, **format, extra_body=asked[0]).choices[0].message
    assert json_.content.startswith("{")
    said = client.responses.create(
        model="always",
        input="Hi",
        max_output_tokens=20,
        extra_body={"reasoning": {"max_tokens": 4}},
    )
    assert [one.type for one in said.output] == ["reasoning", "message"]
    both = {"thinking_token_budget": 5, "reasoning": {"max_tokens": 4}}
    with pytest.raises(openai.BadRequestError) as wrong:
        create(client, **given, extra_body=both)
    assert wrong.value.param == "reasoning.max_tokens"


def test_thoughts_that_are_left_out(client: openai.OpenAI) -> None:
    given = {"model": "always", "tools": openai.NOT_GIVEN, "max_tokens": 20}
    shown = create(client, **given, extra_body={"thinking_token_budget": 4}).choices[0].message
    for more in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        body = {"thinking_token_budget": 4, **more}
        message = create(client, **given, extra_body=body).choices[0].message
        assert message.content == shown.content
        assert "reasoning_content" not in (message.model_extra or {})
        pieces = [
            one.choices[0].delta for one in create(client, **given, extra_body=body, stream=True)
        ]
        assert "".join(one.content or "" for one in pieces) == shown.content
        assert not any("reasoning_content" in (one.model_extra or {}) for one in pieces)


def test_what_the_server_says_of_thinking(client: openai.OpenAI, running: Running) -> None:
    settings = running.service.settings
    asked = {"model": "thinking", "messages": ASKED}

    def prompt(**more: Any) -> str:
        return httpx.post(f"{running.url}/apply-template", json=asked | more).json()["prompt"]

    object.__setattr__(settings, "template_variables", {"enable_thinking": True, "other": 1})
    try:
        assert prompt().endswith("<think>\n")
        assert not prompt(reasoning_effort="none").endswith("<think>\n")
        off = prompt(chat_template_kwargs={"enable_thinking": False})
        assert not off.endswith("<think>\n")
    finally:
        object.__setattr__(settings, "template_variables", {})


def test_a_call_after_a_thought(client: openai.OpenAI) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "<think>It is Rome.</think>"}]
    more = {"continue_final_message": True}
    answer = create(
        client, model="thinking", messages=messages, tool_choice="required", extra_body=more,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    arguments_of(call)


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


def test_a_response_with_thoughts(client: openai.OpenAI) -> None:
    # The operator's word for where thoughts are.
    answer = client.responses.create(
        model="always", input="Hello", max_output_tokens=8, temperature=0
    )
    (item,) = answer.output
    assert item.type == "reasoning"
    assert item.content is not None
    assert item.content[0].text
    events = client.responses.create(
        model="always", input="Hello", max_output_tokens=8, temperature=0, stream=True
    )
    deltas = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text


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
