"""openai-python, from 1.109 on."""

import asyncio
import importlib
import json
import time
from typing import Any, ClassVar

from tests.server.clients.checks import Checks, Server, raised

openai: Any = importlib.import_module("openai")
pydantic: Any = importlib.import_module("pydantic")

CHECKS = Checks()
USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
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
        "strict": True,
    },
}
CALL: Any = {"type": "function", "function": {"name": "weather"}}
RESPONSE_TOOL: Any = {"type": "function", **WEATHER["function"]}
LONG = "word " * 20000  # beyond any context
SURE: Any = {"temperature": 0, "max_tokens": 120}


class City(pydantic.BaseModel):
    model_config: ClassVar[Any] = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12, pattern="^[A-Z][a-z]+$")
    big: bool


def client(server: Server, **more: Any) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, **more)


def chat(server: Server, messages: Any = None, **more: Any) -> Any:
    given = {"model": server.model, "messages": messages or USER, **SURE, **more}
    return client(server).chat.completions.create(**given)


@CHECKS
def models(server: Server) -> None:
    listed = client(server).models.list().data
    assert [item.id for item in listed] == [server.model]
    assert client(server).models.retrieve(server.model).id == server.model


@CHECKS
def answer(server: Server) -> None:
    found = chat(server, max_tokens=8)
    assert found.choices[0].message.content
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 8


@CHECKS
def stream(server: Server) -> None:
    options = {"include_usage": True}
    chunks = list(chat(server, max_tokens=8, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat(server, max_tokens=8).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


@CHECKS
def usage_in_every_piece(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(server, max_tokens=6, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@CHECKS
def developer_and_names(server: Server) -> None:
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    ]
    assert chat(server, messages, max_tokens=4).choices[0].message.content


@CHECKS
def a_message_given_back(server: Server) -> None:
    """As the object, and as all its fields, null or not."""
    message = chat(server, max_tokens=8).choices[0].message
    for again in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        assert chat(server, [*USER, again, *USER], max_tokens=4).choices[0].message.content


@CHECKS
def a_loop_of_tools(server: Server) -> None:
    found = chat(server, tools=[WEATHER], tool_choice=CALL).choices[0]
    (call,) = found.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    for message in (found.message, found.message.model_dump()):
        more = chat(server, [*USER, message, result], tools=[WEATHER], max_tokens=16)
        assert more.choices[0].message


@CHECKS
def a_tool_that_said_nothing(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
    ]
    assert chat(server, messages, tools=[WEATHER], max_tokens=4).choices


@CHECKS
def streamed_calls(server: Server) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with client(server).chat.completions.stream(
        model=server.model, messages=USER, **SURE, **asked
    ) as pieces:
        kinds = {event.type for event in pieces}
        final = pieces.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.tool_calls[0].function.name == "weather"
    message = final.choices[0].message
    again = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id,
                              "content": "It rains."}]  # fmt: skip
    assert chat(server, again, tools=[WEATHER], max_tokens=4).choices


@CHECKS
def a_call_that_is_cut(server: Server) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 18}
    found = chat(server, **asked).choices[0]
    pieces = list(chat(server, **asked, stream=True))
    assert found.finish_reason == "length" == pieces[-1].choices[0].finish_reason
    assert not found.message.content
    assert not any(piece.choices[0].delta.content for piece in pieces)


@CHECKS
def parsed(server: Server) -> None:
    given = {"model": server.model, "messages": USER, **SURE, "response_format": City}
    found = client(server).chat.completions.parse(**given)
    assert isinstance(found.choices[0].message.parsed, City)
    with client(server).chat.completions.stream(**given) as pieces:
        final = pieces.get_final_completion()
    assert final.choices[0].message.parsed == found.choices[0].message.parsed
    assert chat(server, [*USER, found.choices[0].message, *USER], max_tokens=4).choices


@CHECKS
def log_probabilities(server: Server) -> None:
    found = chat(server, max_tokens=3, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(found) == 3
    assert all(len(item.top_logprobs) == 4 for item in found)


@CHECKS
def texts(server: Server) -> None:
    given = {"model": server.model, "prompt": "naïve 😀 café", "echo": True, "logprobs": 2}
    (choice,) = client(server).completions.create(**given, max_tokens=3, temperature=0).choices
    assert choice.text.startswith("naïve 😀 café")
    assert max(choice.logprobs.text_offset) <= len(choice.text)


@CHECKS
def vectors(server: Server) -> None:
    """The SDK requests base64 by default."""
    for more in ({}, {"encoding_format": "float"}):
        given = {"model": server.model, "input": ["a", "b"], "dimensions": 64, **more}
        assert len(client(server).embeddings.create(**given).data[1].embedding) == 64


@CHECKS
def what_hosted_models_read(server: Server) -> None:
    """Fields with an effect on OpenAI's models only."""
    for field in (
        {"reasoning_effort": "low"},
        {"verbosity": "low"},
        {"service_tier": "flex"},
        {"store": True},
        {"top_p": 0},
        {"seed": 1},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        assert chat(server, **{"max_tokens": 2, **field}).choices, field


@CHECKS
def errors(server: Server) -> None:
    error = raised(openai.BadRequestError, chat, server, temperature=-1)
    assert error.param == "temperature"
    error = raised(openai.BadRequestError, chat, server, [{"role": "user", "content": LONG}])
    assert error.code == "context_length_exceeded"
    assert "maximum context length is" in str(error)


@CHECKS
def raw_headers(server: Server) -> None:
    raw = client(server).chat.completions.with_raw_response.create(
        model=server.model, messages=USER, max_tokens=2
    )
    assert raw.headers["x-request-id"]
    assert raw.parse().choices


@CHECKS
async def eight_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as asked:
        given = {"model": server.model, "messages": USER, **SURE, "max_tokens": 6}
        answers = await asyncio.gather(*(asked.chat.completions.create(**given) for _ in range(8)))
    assert len({item.choices[0].message.content for item in answers}) == 1


def respond(server: Server, **more: Any) -> Any:
    given = {"model": server.model, "temperature": 0, "max_output_tokens": 120, **more}
    return client(server).responses.create(**given)


@CHECKS
def responses(server: Server) -> None:
    found = respond(server, input="Hello", max_output_tokens=20)
    assert found.output_text
    events = list(respond(server, input="Hello", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    for again in (found.output, [item.model_dump() for item in found.output]):
        items = [{"role": "user", "content": "Hello"}, *again, {"role": "user", "content": "So?"}]
        assert respond(server, input=items, max_output_tokens=8).output_text


@CHECKS
def responses_parsed(server: Server) -> None:
    found = client(server).responses.parse(
        model=server.model, input="A city", text_format=City, temperature=0, max_output_tokens=120
    )
    assert isinstance(found.output_parsed, City)


@CHECKS
def responses_with_tools(server: Server) -> None:
    choice = {"type": "function", "name": "weather"}
    found = respond(server, input=USER, tools=[RESPONSE_TOOL], tool_choice=choice)
    (call,) = found.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    for again in (call, call.model_dump()):
        more = respond(
            server, input=[*USER, again, result], tools=[RESPONSE_TOOL], max_output_tokens=16
        )
        assert more.output


@CHECKS
def responses_as_agents_ask(server: Server) -> None:
    for field in (
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"store": True},
        {"text": {"verbosity": "low"}},
        {"extra_body": {"client_metadata": {"a": "b"}}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        assert respond(server, input="Hello", **{"max_output_tokens": 2, **field}).output, field


@CHECKS
def responses_that_are_stored(server: Server) -> None:
    first = respond(server, input="My name is Ada.", max_output_tokens=8)
    asked = {"input": "What is my name?", "previous_response_id": first.id}
    second = respond(server, **asked, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.total_tokens
    *_, last = respond(server, **asked, max_output_tokens=8, stream=True)
    assert last.response.output_text == second.output_text
    assert client(server).responses.retrieve(first.id).output_text == first.output_text
    assert len(client(server).responses.input_items.list(second.id).data) == 3
    client(server).responses.delete(first.id)
    raised(openai.NotFoundError, client(server).responses.retrieve, first.id)
    count = client(server).responses.input_tokens.count(model=server.model, input="Hello")
    assert count.input_tokens


@CHECKS
def responses_in_the_background(server: Server) -> None:
    given = {"input": "Hello", "background": True, "max_output_tokens": 8}
    found = respond(server, **given)
    while found.status in ("queued", "in_progress"):
        found = client(server).responses.retrieve(found.id)
    assert found.output_text
    events = list(respond(server, **given, stream=True))
    again = client(server).responses.retrieve(events[0].response.id, stream=True, starting_after=2)
    assert [item.sequence_number for item in again] == list(range(3, len(events)))
    long = respond(server, **{**given, "max_output_tokens": 1000}, extra_body={"ignore_eos": True})
    assert client(server).responses.cancel(long.id).status == "cancelled"


@CHECKS
def responses_with_custom_tools(server: Server) -> None:
    tool = {"type": "custom", "name": "note", "description": "Takes a note."}
    choice = {"type": "custom", "name": "note"}
    found = respond(server, input=USER, tools=[tool], tool_choice=choice, max_output_tokens=300)
    (call,) = found.output
    assert call.type == "custom_tool_call"
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Noted."}
    asked = {"input": [*USER, call, result], "tools": [tool], "max_output_tokens": 16}
    assert respond(server, **asked).output


@CHECKS
def batches(server: Server) -> None:
    """Of a server that keeps files."""
    sdk = client(server)
    body = {"model": server.model, "messages": USER, **SURE, "max_tokens": 4}
    url = "/v1/chat/completions"
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i in range(3)]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = sdk.files.create(file=("a.jsonl", data), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = sdk.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    found = [json.loads(line) for line in sdk.files.content(batch.output_file_id).text.splitlines()]
    assert {item["custom_id"] for item in found} == {"0", "1", "2"}
    assert batch.id in [item.id for item in sdk.batches.list(limit=5)]
    assert file.id in [item.id for item in sdk.files.list()]
    assert sdk.files.delete(file.id).deleted
