"""Chat completions, through openai-python."""

import json

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from jinfer import SamplingParams
from jinfer.engine.output.completion import Usage
from jinfer.server.core import usage
from tests.server.running import Running

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello! How can I assist you today?"


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smol", messages=HELLO, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "smol"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 31
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == 41


def test_an_answer_given_back_as_it_came(smol: Running) -> None:
    """Fields of OpenAI's answers other than the text."""
    answered: dict[str, object] = {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "annotations": [],
    }
    body = {"messages": [*HELLO, answered, *HELLO], "max_tokens": 1, "top_logprobs": 0}
    with smol.client() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="smol",
            messages=HELLO,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    *spoken, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 10
    # The same prompt was computed before, or is found in the cache the second time.
    assert last.usage.prompt_tokens_details is not None
    roles = [chunk.choices[0].delta.role for chunk in spoken]
    assert roles == ["assistant"] + [None] * (len(spoken) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == ANSWER
    assert spoken[-1].choices[0].finish_reason == "stop"
    assert spoken[-1].choices[0].delta.content is None
    assert all(chunk.choices[0].finish_reason is None for chunk in spoken[:-1])


def test_the_form_of_a_stream(smol: Running) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 2, "stream": True}
    path = "/v1/chat/completions"
    with smol.client() as http, http.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = list(answer.iter_lines())
    events = [line for line in lines if line]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert lines[1::2] == [""] * (len(lines) // 2)
    assert all("usage" not in json.loads(line[6:]) for line in events[:-1])


def test_usage_in_every_piece(smol: Running) -> None:
    """As in vLLM: each chunk has more tokens than the previous, the last has the finish reason."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 4, "stream": True}
    with smol.client() as http:
        answer = http.post("/v1/chat/completions", json={**body, "stream_options": options})
    events = [line[6:] for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event) for event in events[:-1]]
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == [0, 1, 2, 3, 4, 4]
    assert len({piece["usage"]["prompt_tokens"] for piece in pieces}) == 1
    reasons = [choice["finish_reason"] for piece in pieces for choice in piece["choices"]]
    assert reasons == [None] * 4 + ["length"]


def test_rates_leave_the_first_token_out() -> None:
    """The time begins with it."""
    found = usage.llamacpp_timings(Usage(10, 5, 1.0, 2.0))
    assert (found["predicted_n"], found["predicted_ms"]) == (5, 2000)
    assert (found["predicted_per_second"], found["predicted_per_token_ms"]) == (2, 500)
    assert usage.llamacpp_timings(Usage(10, 1, 1.0, 0.0))["predicted_per_second"] == 0


def test_cached_tokens(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Say something that nobody has asked you before."}
    ]
    found = [
        client.chat.completions.create(model="smol", messages=messages, max_tokens=1).usage
        for _ in range(2)
    ]
    cached = [item.prompt_tokens_details.cached_tokens for item in found]  # type: ignore[union-attr]
    assert cached[0] is not None
    assert cached[1] == found[0].prompt_tokens - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    given = {"model": "smol", "messages": HELLO, "temperature": 0, "logprobs": True}
    if stream:
        chunks = client.chat.completions.create(**given, top_logprobs=2, stream=True)  # type: ignore[call-overload]
        entries = [
            entry
            for chunk in chunks
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
    else:
        answer = client.chat.completions.create(**given, top_logprobs=2)  # type: ignore[call-overload]
        entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries[:-1]) == ANSWER
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    assert all(entry.logprob <= 0 for entry in entries)


def test_several_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=HELLO, n=3, seed=1, temperature=1.5, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 31
    chunks = client.chat.completions.create(
        model="smol", messages=HELLO, n=3, seed=1, temperature=1.5, max_tokens=8, stream=True
    )
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_stop(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=HELLO, temperature=0, stop=[" assist"]
    )
    assert answer.choices[0].message.content == "Hello! How can I"
    assert answer.choices[0].finish_reason == "stop"
    with_it = client.chat.completions.create(
        model="smol",
        messages=HELLO,
        temperature=0,
        stop=" assist",
        extra_body={"include_stop_str_in_output": True},
    )
    assert with_it.choices[0].message.content == "Hello! How can I assist"


def test_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=HELLO, temperature=0, max_completion_tokens=3
    )
    assert answer.choices[0].message.content == "Hello! How"
    assert answer.choices[0].finish_reason == "length"


def test_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Invent a person."}],
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        },
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert isinstance(person["name"], str)
    assert isinstance(person["age"], int)


def test_a_whole_conversation(client: openai.OpenAI, smol: Running) -> None:
    answer = client.chat.completions.create(
        model="smol",
        messages=[
            {"role": "developer", "content": "You answer briefly."},
            {"role": "user", "content": [{"type": "text", "text": "My name is Ada."}]},
            {"role": "assistant", "content": "Hello, Ada."},
            {"role": "user", "content": "What is my name?"},
        ],
        temperature=0,
        max_tokens=20,
    )
    llm = smol.model().llm
    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    expected = llm.chat(messages, SamplingParams(max_tokens=20))
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


def test_prompt_log_probabilities(smol: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    answer = httpx.post(f"{smol.url}/v1/chat/completions", json=body, timeout=60).json()
    ids = smol.model().llm.encode_chat([{"role": "user", "content": "Hello"}])
    assert answer["prompt_token_ids"] == ids
    assert len(answer["prompt_logprobs"]) == len(ids)
    assert all(
        str(id) in item for id, item in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
    )


def test_going_on_with_the_last_message(smol: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello! How can"}]
    body = {"messages": messages, "temperature": 0, "continue_final_message": True}
    answer = httpx.post(f"{smol.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == " I assist you today?"


def test_several_conversations(smol: Running) -> None:
    """Each answer is that of a request of its own."""
    path, more = "/v1/chat/completions", {"max_tokens": 4, "temperature": 0}
    talks = [[{"role": "user", "content": text}] for text in ("Hello", "What is 1+1?")]
    with smol.client() as http:
        alone = [http.post(path, json={"messages": talk, **more}).json() for talk in talks]
        both = http.post(f"{path}/batch", json={"messages": talks, **more}).json()
        said = [item["choices"][0]["message"] for item in alone]
        assert [item["message"] for item in both["choices"]] == said
        assert [item["index"] for item in both["choices"]] == [0, 1]
        total = sum(item["usage"]["total_tokens"] for item in alone)
        assert both["usage"]["total_tokens"] == total
        for wrong, param in (
            ({"messages": [talks[0], [{"role": "x", "content": [1]}]]}, "messages.1.0.content.0"),
            ({"stream": True}, "stream"),
            ({"n": 2}, "n"),
        ):
            answer = http.post(f"{path}/batch", json={"messages": talks, **more, **wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
