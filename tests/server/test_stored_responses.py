"""Responses that are stored, continued, made in the background, streamed again and cancelled."""

import json
import os
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from jinfer.server.openai.response_items import ResponseItems
from jinfer.server.stores.response_store import ResponseStore, StoredResponse
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ToolCallDelta
from tests.server.running import Running

ANSWER = "Hello! How can I assist you today?"


def asked(client: openai.OpenAI, said: Any, **more: Any) -> Any:
    given = {"model": "smol", "input": said, "temperature": 0, **more}
    return client.responses.create(**given)


def ended(client: openai.OpenAI, id: str) -> Any:
    """A response in the background, once it has ended."""
    end = time.monotonic() + 60
    while (found := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_conversation_goes_on(client: openai.OpenAI, smol: Running) -> None:
    first = asked(client, "My name is Ada.", instructions="Be brief.", max_output_tokens=6)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = asked(client, "What is my name?", previous_response_id=first.id, max_output_tokens=6)
    messages = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    # As at OpenAI, instructions are those of their own request alone.
    assert second.usage.input_tokens == len(smol.model().llm.encode_chat(messages))
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [one.role for one in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.data == items[-1:]
    assert page.has_more
    assert client.responses.input_items.list(second.id, after=items[-1].id).data == items[1::-1]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    third = asked(client, "Sure?", previous_response_id=second.id, max_output_tokens=2)
    assert third.usage.input_tokens > second.usage.input_tokens
    reference: Any = {"type": "item_reference", "id": third.output[0].id}
    given: Any = [{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}]
    again = asked(client, given, max_output_tokens=1)
    given[1] = {"role": "assistant", "content": third.output_text}
    assert asked(client, given, max_output_tokens=1).usage.input_tokens == again.usage.input_tokens
    count = client.responses.input_tokens.count(
        model="smol", input="Sure?", previous_response_id=second.id
    )
    assert count.input_tokens == third.usage.input_tokens


def test_an_answer_that_is_not_stored(client: openai.OpenAI) -> None:
    answer = asked(client, "Hello", store=False, max_output_tokens=2)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as found:
        asked(client, "a", previous_response_id=answer.id)
    assert found.value.code == "previous_response_not_found"


def test_in_the_background(client: openai.OpenAI, smol: Running) -> None:
    answer = asked(client, "Hello", background=True)
    assert answer.status in ("queued", "in_progress")
    found = ended(client, answer.id)
    assert (found.status, found.output_text, found.background) == ("completed", ANSWER, True)
    events = client.responses.retrieve(answer.id, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, "a " * 5000, background=True)
    assert refused.value.code == "context_length_exceeded"


def test_a_stream_that_goes_on(client: openai.OpenAI) -> None:
    """The client disconnects after some events, and reads the others later."""
    seen = []
    with asked(client, "Hello", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 6:
                break
    id = seen[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=5))
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == ANSWER


def test_cancelling(client: openai.OpenAI) -> None:
    long: Any = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    answer = asked(client, "Hello", background=True, **long)
    with pytest.raises(openai.BadRequestError, match="it is "):
        asked(client, "And?", previous_response_id=answer.id)
    assert client.responses.cancel(answer.id).status == "cancelled"
    assert client.responses.cancel(answer.id).status == "cancelled"
    assert client.responses.retrieve(answer.id).status == "cancelled"
    last: Any = list(client.responses.retrieve(answer.id, stream=True))[-1]
    assert last.type == "response.cancelled"
    whole = asked(client, "Hello", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="background response"):
        client.responses.cancel(whole.id)
    running = asked(client, "Hello", background=True, **long)
    client.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/responses/resp_1", 404, "response_id"),
        ("/v1/responses/resp_1/input_items", 404, "response_id"),
        ("/v1/responses/resp_1?stream=yes", 400, "stream"),
        ("/v1/responses/resp_1?starting_after=1", 400, "starting_after"),
        ("/v1/responses/resp_1?stream=true&starting_after=-1", 400, "starting_after"),
        ("/v1/responses/resp_1?stream=true", 404, "response_id"),
        ("/v1/responses/input_tokens", 405, None),
    ],
)
def test_what_there_is_not(smol: Running, path: str, status: int, param: str | None) -> None:
    with smol.client() as http:
        answer = http.get(path)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def stored(number: int, words: int = 1, status: str = "completed") -> StoredResponse:
    response = {
        "id": f"resp_{number:032x}",
        "status": status,
        "output": [{"id": f"m{number}", "text": "a" * words}],
    }
    return StoredResponse(response, [{"type": "message", "content": str(number)}])


@pytest.mark.parametrize("folder", [True, False])
def test_a_store_is_bounded(tmp_path: Path, folder: bool) -> None:
    store = ResponseStore(tmp_path / "r" if folder else None, max_responses=3, max_bytes=2000)
    for number in range(4):
        store.put(stored(number))
    ids = [stored(number).response["id"] for number in range(7)]
    assert store.get(ids[0]) is None
    assert store.get(ids[3]) == stored(3)
    store.put(stored(3, status="failed"))
    assert store.get(ids[1]) == stored(1)
    store.put(stored(4, 1700))
    assert store.get(ids[2]) is None
    assert store.get(ids[4]) == stored(4, 1700)
    store.put(stored(5, 5000))
    assert store.get(ids[5]) is None
    store.put(stored(6))
    assert store.item("m6") == stored(6).response["output"][0]
    assert store.delete(ids[6])
    assert store._items == {}
    assert not store.delete(ids[6])
    assert store._bytes == 0


def test_a_folder_outlives_its_server(tmp_path: Path) -> None:
    first = ResponseStore(tmp_path)
    for number in range(3):
        first.put(stored(number))
        os.utime(tmp_path / f"resp_{number:032x}.json", (time.time(), time.time() - 9 + number))
    (tmp_path / "half.tmp").write_bytes(b"{")
    (tmp_path / f"resp_{1:032x}.json").write_bytes(b"{")
    again = ResponseStore(tmp_path, max_responses=2)
    assert sorted(path.stem[-1] for path in tmp_path.iterdir()) == ["1", "2"]
    assert again.get(stored(1).response["id"]) is None
    assert again.get(stored(2).response["id"]) == stored(2)
    old = ResponseStore(tmp_path, seconds=1.0)
    assert old.get(stored(2).response["id"]) is None
    assert list(tmp_path.iterdir()) == []


def test_calls_of_custom_tools() -> None:
    items = ResponseItems(custom=frozenset({"patch"}))
    events = [
        *items.push(OutputDelta(calls=(ToolCallDelta(0, "c0", "patch", ""),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(0, arguments='{"input": "*** B'),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(0, arguments='egin"}'),)), []),
        *items.push(OutputDelta(calls=(ToolCallDelta(1, "c1", "add", "{}"),)), []),
        *items.close(),
    ]
    custom, function = items.done
    assert (custom["type"], custom["input"], custom["name"]) == (
        "custom_tool_call",
        "*** Begin",
        "patch",
    )
    assert function["type"] == "function_call"
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[1]["delta"] == events[2]["input"] == "*** Begin"


def test_a_coding_agent(client: openai.OpenAI) -> None:
    """What Codex sends: a freeform tool, thoughts and calls given back, and fields for others."""
    tools: list[Any] = [
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
    ]
    more: Any = {
        "instructions": "You are a coding agent.",
        "tools": tools,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "7f7d",
        "store": False,
        "text": {"verbosity": "medium"},
    }
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix."}]}
    choice = {"type": "custom", "name": "apply_patch"}
    answer = asked(client, [user], tool_choice=choice, max_output_tokens=24, **more)
    (call,) = answer.output
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    assert [tool.name for tool in answer.tools] == ["apply_patch", "shell"]
    history = [
        {"type": "message", "role": "developer", "content": "Be careful."},
        user,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "a.py"},
        call.model_dump(),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    some = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "shell"}],
    }
    for tool_choice in ("auto", some):
        stream = asked(
            client,
            history,
            tool_choice=tool_choice,
            stream=True,
            max_output_tokens=4,
            **more,
        )
        assert list(stream)[-1].type == "response.incomplete"
    assert json.loads(answer.model_dump_json())["store"] is False
