"""Responses, through openai-python."""

import json
from typing import Any

import openai
import pytest

from jinfer.server.openai.response_items import ResponseItems
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ToolCallDelta
from tests.server.running import Running

ANSWER = "Hello! How can I assist you today?"


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="smol", input="Hello", temperature=0)
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (31, 10)
    assert answer.usage.input_tokens_details.cached_tokens <= 30
    (item,) = answer.output
    assert item.type == "message"
    assert item.status == "completed"


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="smol", input="Hello", temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert last.response.usage is not None


def test_the_helper_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="smol", input="Hello", temperature=0) as stream:
        text = "".join(item.delta for item in stream if item.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == ANSWER


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="smol", input="Hello", temperature=0, max_output_tokens=3
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Hello! How"


def test_a_conversation(client: openai.OpenAI, smol: Running) -> None:
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "My name is Ada."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello, Ada.", "annotations": []}],
        },
        {"role": "user", "content": "What is my name?"},
    ]
    answer = client.responses.create(
        model="smol", instructions="Be brief.", input=given, temperature=0, max_output_tokens=8
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(smol.model().llm.encode_chat(messages))


def test_a_schema_and_log_probabilities(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.responses.create(
        model="smol",
        input="Say one or two.",
        temperature=0,
        max_output_tokens=30,
        text={"format": {"type": "json_schema", "name": "x", "schema": {**schema}}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert json.loads(answer.output_text)["a"] in (1, 2)
    part = answer.output[0].model_dump()["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(answer.output_text)


def test_truncation(client: openai.OpenAI) -> None:
    long: list[Any] = [
        {"role": "user", "content": "word " * 5000},
        {"role": "assistant", "content": "word " * 20},
        {"role": "user", "content": "Hello"},
    ]
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(model="smol", input=long)
    assert found.value.code == "context_length_exceeded"
    assert found.value.param == "input"
    answer = client.responses.create(
        model="smol", input=long, truncation="auto", max_output_tokens=1
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens < 100


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"include": ["everything"]}, "include.0"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "["}]},
            "input.0.arguments",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.id"),
        ({"input": [{"type": "local_shell_call", "call_id": "a"}]}, "input.0"),
        ({"input": [{"type": "custom_tool_call", "name": "a"}]}, "input.0"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.tools",
        ),
    ],
)
def test_what_is_refused(smol: Running, change: dict[str, Any], param: str | None) -> None:
    with smol.client() as http:
        answer = http.post("/v1/responses", json={"input": "Hello", **change})
    assert answer.status_code in (400, 501), answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_items_of_every_kind() -> None:
    items = ResponseItems()
    events = [
        *items.push(OutputDelta(reasoning="Hm"), []),
        *items.push(OutputDelta(reasoning=", well."), []),
        *items.push(OutputDelta(content="Yes."), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(0, "c0", "add", ""),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(0, arguments='{"a"'),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(0, arguments=":1}"),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(1, "c1", "sub", "{}"),)), []),
        *items.close(),
    ]
    thought, message, first, second = items.done
    assert thought["content"][0]["text"] == "Hm, well."
    assert message["content"][0]["text"] == "Yes."
    assert (first["name"], first["arguments"], first["call_id"]) == ("add", '{"a":1}', "c0")
    assert (second["name"], second["arguments"]) == ("sub", "{}")
    added = [event for event in events if event["type"] == "response.output_item.added"]
    ended = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"] for event in ended] == items.done


def test_an_item_that_was_none() -> None:
    items = ResponseItems()
    items.push(OutputDelta(calls=(ToolCallDelta(0, "c0", "add", '{"a'),)), [])
    items.push(OutputDelta(content="{a", calls=(ToolCallDelta(0, arguments="b", end="void"),)), [])
    items.close()
    call, message = items.done
    assert (call["status"], call["arguments"]) == ("incomplete", '{"ab')
    assert message["content"][0]["text"] == "{a"


def test_an_answer_of_nothing() -> None:
    items = ResponseItems()
    items.close()
    assert items.done[0]["content"][0]["text"] == ""
