"""llama.cpp's tests of Anthropic's interface (tools/server/tests/unit/test_compat_anthropic.py)."""

from typing import Any

from tests.server.peers.llama_chat import LARGE, LLAMA, MEDIA
from tests.server.peers.served import HI, Servers

FILE = "test_compat_anthropic.py"
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
USED = {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "Rome"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


def message(at: Servers, status: int = 200, /, **body: Any) -> Any:
    given = {"model": "test", "max_tokens": 16, "messages": HI, **body}
    return at.chat.post(PATH, status, **given)


def replied(*parts: dict[str, Any], thought: str = "") -> list[dict[str, Any]]:
    """A conversation with a call and what it gave."""
    before = [{"type": "thinking", "thinking": thought, "signature": "x"}] if thought else []
    used = {"role": "assistant", "content": [*before, USED]}
    return [*HI, used, {"role": "user", "content": list(parts)}]


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


@LLAMA.case(FILE, 4, "messages: form, usage, system, parts, turns; no timings")
def _(at: Servers) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the answer?"}]
    turns = [*HI, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": parts}]
    for more in ({}, {"system": "Be brief."}, {"messages": turns}):
        answer = message(at, **more)
        assert (answer["type"], answer["role"]) == ("message", "assistant")
        assert answer["content"][0]["type"] == "text"
        assert answer["stop_reason"] in ("end_turn", "max_tokens")
        assert answer["usage"]["output_tokens"] > 0
        assert {"cache_read_input_tokens", "input_tokens"} <= answer["usage"].keys()
        assert "timings" not in answer


@LLAMA.case(FILE, 3, "streams: order, blocks, indices, tools")
def _(at: Servers) -> None:
    for tools in ({}, {"tools": TOOLS}):
        events = at.chat.stream(PATH, messages=HI, max_tokens=16, **tools)
        kinds = [event["type"] for event in events]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        begun = events[0]["message"]
        assert (begun["content"], begun["role"]) == ([], "assistant")
        assert begun["usage"]["input_tokens"] + begun["usage"]["cache_read_input_tokens"] > 0
        starts = [event["index"] for event in events if event["type"] == "content_block_start"]
        stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert starts == stops == list(range(len(starts)))
        assert events[-2]["usage"]["output_tokens"] > 0


@LLAMA.case(FILE, 3, "tokens counted, without max_tokens")
def _(at: Servers) -> None:
    for more in ({}, {"system": "Be brief."}):
        answer = at.chat.post(COUNT, model="test", messages=HI, **more)
        assert answer["input_tokens"] > 0
        assert answer.keys() == {"input_tokens"}


@LLAMA.case(FILE, 4, "tools, and results: texts, beside text, errors")
def _(at: Servers) -> None:
    message(at, tools=TOOLS, max_tokens=64)
    text = {"type": "text", "text": "Here it is:"}
    for parts in ([result("Sunny")], [text, result("Sunny")], [result("No", is_error=True)]):
        answer = message(at, messages=replied(*parts))
        assert answer["content"][0]["type"] == "text"


@LLAMA.case(FILE, 2, "images are refused in words", "")
def _(at: Servers) -> None:
    for messages in (replied(result([PNG])), [{"role": "user", "content": [PNG]}]):
        assert "image" in message(at, 400, messages=messages)["error"]["message"]


@LLAMA.case(FILE, 6, "stop sequences, sampling, metadata, thinking")
def _(at: Servers) -> None:
    more: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 50}, "top_k": 40}
    message(at, stop_sequences=["\n"], temperature=0.5, top_p=0.9, **more)
    message(at, metadata={"user_id": "me"})


@LLAMA.case(FILE, 1, "messages are needed")
def _(at: Servers) -> None:
    at.chat.post(PATH, 400, model="test", max_tokens=5)


@LLAMA.case(FILE, 1, "no messages at all are answered", "refused, as Anthropic does")
def _(at: Servers) -> None:
    message(at, messages=[])


@LLAMA.case(FILE, 1, "another form than OpenAI's")
def _(at: Servers) -> None:
    assert at.chat.chat()["object"] == "chat.completion"
    assert message(at)["type"] == "message"


@LLAMA.case(FILE, 2, "earlier thoughts are read")
def _(at: Servers) -> None:
    def tokens(thought: str) -> int:
        messages = replied(result("Sunny"), thought=thought)
        return int(at.thinks.post(COUNT, messages=messages, tools=TOOLS)["input_tokens"])

    assert tokens("I should look first.") > tokens("")


LLAMA.apart(FILE, 1, "an image read", MEDIA)
LLAMA.apart(FILE, 2, "thoughts of DeepSeek R1", LARGE)
