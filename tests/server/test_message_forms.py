"""Messages to chats, and back to blocks and errors, without a server."""

import json
from typing import Any

import pytest

from jinfer.server.anthropic.anthropic_schemas import MessagesRequest
from jinfer.server.anthropic.anthropic_to_chat import chat_request, field_name
from jinfer.server.anthropic.messages import MessageBlocks
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.request_body import validated
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ToolCallDelta
from tests.server.test_messages import HELLO, WEATHER


def test_a_conversation_becomes_a_chat() -> None:
    told: list[str] = []

    def chat(**given: Any) -> dict[str, Any]:
        body = validated({"messages": HELLO, **given}, MessagesRequest)
        asked = chat_request(body, lambda field, why: told.append(field))
        return json.loads(asked.model_dump_json(exclude_none=True, exclude_unset=True))

    text = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    call = {
        "type": "tool_use",
        "id": "t1",
        "name": "f",
        "input": {"a": 1},
        "caller": {"type": "direct"},
    }
    asked = chat(
        system=[text, {"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": "Hello"},
            {"role": "user", "content": [text]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "So.", "citations": None},
                    call,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [
                        {"type": "text", "text": "no"}, {"type": "text", "text": "file"}]},
                    {"type": "tool_result", "tool_use_id": "t2"},
                    text,
                    {"type": "document", "title": "A", "source": {"type": "text", "data": "B"}},
                    {"type": "search_result", "title": "C", "source": "u", "content": [
                        {"type": "text", "text": "D"}]},
                ],
            },
        ],
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
    )  # fmt: skip
    assert asked["messages"] == [
        {"role": "system", "content": "Look.\nBe brief."},
        {"role": "user", "content": "Hello\nLook."},
        {
            "role": "assistant",
            "content": "So.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "content": "Error: no\nfile", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "Look.\nA\nB\nC\nu\nD"},
    ]
    assert asked["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    assert (asked["stop"], asked["reasoning_effort"]) == (["x"], "low")
    assert asked["thinking"] == {"type": "disabled"}
    assert told == ["messages.2.content.1.type"]
    body = validated({"messages": HELLO, "stop_sequences": ["x"]}, MessagesRequest)
    assert field_name("tools.0.function.parameters/a", body) == "tools.0.input_schema/a"
    assert field_name("stop", body) == "stop_sequences"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(413, "a"), 413, "request_too_large"),
        (ApiError(429, "a"), 429, "rate_limit_error"),
        (ApiError(500, "a"), 500, "api_error"),
        (ApiError(501, "a"), 400, "invalid_request_error"),
        (ApiError(503, "a", code="loading"), 529, "overloaded_error"),
        (ApiError(503, "a", code="deadline_exceeded"), 504, "timeout_error"),
    ],
)
def test_statuses_of_anthropic(error: ApiError, status: int, kind: str) -> None:
    from jinfer.server.anthropic.messages import ANTHROPIC_ERRORS

    assert ANTHROPIC_ERRORS.status(error) == status
    expected = {"type": "error", "error": {"type": kind, "message": "a"}}
    assert ANTHROPIC_ERRORS.body(error) == expected


def test_blocks_of_every_kind() -> None:
    blocks = MessageBlocks()
    events = [
        *blocks.push(OutputDelta(reasoning="Hm")),
        *blocks.push(OutputDelta(reasoning=", well.")),
        *blocks.push(OutputDelta(content="Yes.")),
        *blocks.push(OutputDelta(calls=(ToolCallDelta(0, "c0", "add", ""),))),
        *blocks.push(OutputDelta(calls=(ToolCallDelta(0, arguments='{"a"'),))),
        *blocks.push(OutputDelta(calls=(ToolCallDelta(0, arguments=":1}", end="done"),))),
        *blocks.push(OutputDelta(calls=(ToolCallDelta(1, "c1", "sub", '{"b', end="cut"),))),
        *blocks.close(),
    ]
    thought, text, first, second = blocks.done
    assert (thought["thinking"], text["text"]) == ("Hm, well.", "Yes.")
    assert first == {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}}
    assert second["input"] == {}
    assert blocks.called
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert kinds == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)),
        *(("start", 3), ("delta", 3), ("stop", 3)),
    ]
    assert events[3]["delta"] == {"type": "signature_delta", "signature": thought["signature"]}
