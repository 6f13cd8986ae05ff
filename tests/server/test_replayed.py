"""Replayed messages: an answer of any server may be sent back unchanged."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from jinfer.modelspec.model_spec import PromptSpec
from jinfer.server.core.chat_schemas import Message
from jinfer.server.core.image_parts import ImageParts
from jinfer.server.core.prompt_builder import template_messages
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.tool_parsers.template_shape import convert_messages, detect_shape
from jinfer.template import ChatTemplate
from jinfer.template.chat_prompt import Conversation
from tests.server.running import Running

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "content": "21"}


class Number(BaseModel):
    a: bool


def prompt_of(smol: Running, *messages: Any, **more: Any) -> str:
    """The prompt of a conversation, of which none of the fields may be wrong."""
    with smol.client() as http:
        answer = http.post("/apply-template", json={"messages": [*HELLO, *messages], **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_what_the_chat_client_gives(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "smol", "max_tokens": 30, "temperature": 0}
    plain = client.chat.completions.create(messages=HELLO, **given).choices[0].message
    with client.chat.completions.stream(messages=HELLO, **given) as stream:
        streamed = stream.get_final_completion().choices[0].message if list(stream) else None
    parsed = client.chat.completions.parse(
        messages=HELLO, response_format=Number, **given | {"max_tokens": 60}
    )
    for item in (plain, streamed, parsed.choices[0].message):
        assert item is not None
        for form in (item, item.model_dump(), item.to_dict()):
            again: Any = [*HELLO, form, *HELLO]
            client.chat.completions.create(messages=again, **given | {"max_tokens": 1})


def test_what_the_responses_client_gives(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "smol", "temperature": 0}
    plain = client.responses.create(input="Hello", max_output_tokens=8, **given)
    parsed = client.responses.parse(input="Hello", text_format=Number, **given)
    for value in (plain, parsed):
        for forms in (value.output, [item.model_dump() for item in value.output]):
            again: Any = [*HELLO, *forms, *HELLO]
            client.responses.create(input=again, max_output_tokens=1, **given)


def test_null_is_nothing(smol: Running) -> None:
    empty = dict.fromkeys(("audio", "refusal", "annotations", "function_call", "reasoning", "x"))
    said = {"role": "assistant", "content": "Yes."}
    part = {"type": "text", "text": "Why?", "image_url": None, "cache_control": None}
    asked = {"role": "user", "content": [part], "name": None, "x": None}
    tool = {"type": "function", "function": {"name": "f", "strict": None, "x": None}, "x": None}
    assert prompt_of(smol, {**said, **empty}, asked, tools=[tool], documents=None, x=None) == (
        prompt_of(smol, said, {"role": "user", "content": "Why?"},
                  tools=[{"type": "function", "function": {"name": "f"}}])
    )  # fmt: skip
    with smol.client() as http:
        schema = {"type": "object", "properties": {"a": {"enum": [None]}}, "required": ["a"],
                  "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
                  }  # fmt: skip
        body = {"messages": HELLO, "json_schema": schema, "max_tokens": 20, "stop": None}
        answer = http.post(CHAT, json=body).json()
    # Where null has a meaning of its own it keeps it.
    assert answer["choices"][0]["message"]["content"] == '{"a":null}'


@pytest.mark.parametrize("said", ["", " ", "null", "{}", None])
def test_a_call_without_arguments(smol: Running, said: str | None) -> None:
    def calling(arguments: str | None) -> dict[str, Any]:
        function = {"name": "now", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "function": function}],
        }

    found = prompt_of(smol, calling(said), ANSWERED)
    assert '{"name": "now", "arguments": {}}' in found
    older = {"role": "assistant", "function_call": {"name": "now", "arguments": said}}
    assert found == prompt_of(smol, older, {"role": "function", "name": "now", "content": "21"})
    with smol.client() as http:
        call = {"type": "function_call", "call_id": "a", "name": "now", "arguments": said}
        output = {"type": "function_call_output", "call_id": "a", "output": None}
        body = {"input": [*HELLO, call, output], "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).status_code == 200


def test_arguments_as_an_object(smol: Running) -> None:
    given = {"a": 1, "b": {"c": ["ä", None]}}
    text = json.dumps(given)

    def called(said: Any) -> str:
        call = {**CALL, "function": {"name": "f", "arguments": said}}
        return prompt_of(smol, {"role": "assistant", "tool_calls": [call]}, ANSWERED)

    assert called(given) == called(text)
    with smol.client() as http:
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": given}
        output = {"type": "function_call_output", "call_id": "a", "output": "21"}
        body = {"input": [*HELLO, call, output], "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize("said", ["[]", "5", '"a"', '{"a":', [], 5])
def test_arguments_that_are_none(smol: Running, said: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": said}}
    body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, ANSWERED]}
    with smol.client() as http:
        error = http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"


def test_a_tool_that_gave_nothing(smol: Running) -> None:
    calling = {"role": "assistant", "tool_calls": [CALL]}
    assert prompt_of(smol, calling, {**ANSWERED, "content": None}) == (
        prompt_of(smol, calling, {**ANSWERED, "content": ""})
    )


def test_extra_fields_of_replayed_answers(smol: Running) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f"}}
    said = {
        "role": "assistant",
        "content": "Yes.",
        "annotations": [{"type": "url_citation"}],
        "audio": {"id": "a1"},
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "provider_specific_fields": {"thoughts": 1},
        "thinking_blocks": [],
        "tool_calls": [{**CALL, "async_": True}],
        "parsed": {"a": 1},
        **cached,
    }
    asked = {"role": "user", "content": [{"type": "text", "text": "Why?", **cached}], **cached}
    with smol.client() as http:
        body = {"messages": [*HELLO, said, ANSWERED, asked], "tools": [{**tool, **cached}]}
        answer = http.post("/apply-template", json=body)
    plain = {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}
    why = {"role": "user", "content": "Why?"}
    assert answer.json()["prompt"] == prompt_of(smol, plain, ANSWERED, why, tools=[tool])
    # Nothing is lost by a hint to cache: beginnings are found without one.
    assert answer.headers["x-jinfer-ignored"].split(", ") == [
        "messages.1.tool_calls.0.async_",
        "messages.1.annotations",
        "messages.1.audio",
        "messages.1.reasoning_details",
        "messages.1.provider_specific_fields",
        "messages.1.parsed",
    ]


def messages(template: str, *given: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as that template is given them."""
    conversation = Conversation(PromptSpec(), template)
    found = [Message.model_validate(item) for item in given]
    return template_messages(found, conversation, ImageParts(ServerSettings(), supported=False))


def test_thoughts_by_their_other_name() -> None:
    said = {"role": "assistant", "content": "Yes."}
    first, second = messages("", said | {"reasoning": "Hm."}, said | {"reasoning_content": "Hm."})
    assert first == second
    assert first["reasoning_content"] == "Hm."


def test_a_template_that_takes_arguments_apart() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
        "<{{ k }}={{ v }}>{% endfor %}{% endfor %}"
        "{% endfor %}"
    )
    way = detect_shape(template)
    assert way is not None
    for said, shown in (("", "f"), ("null", "f"), ('{"a": 1}', "f<a=1>")):
        call = {**CALL, "function": {"name": "f", "arguments": said}}
        given = messages(template, {"role": "assistant", "tool_calls": [call]})
        assert ChatTemplate(template).render(convert_messages(given, way)) == shown


def test_a_role_of_a_template() -> None:
    given = {"role": "control", "content": "thinking"}
    assert messages("{% if m.role == 'control' %}{% endif %}", given) == [given]
    numbered = {"role": "document 1", "content": "Once upon a time"}
    assert messages("{% if m.role.split(' ')[0] == 'document' %}{% endif %}", numbered) == [
        numbered
    ]
    told = {"role": "developer", "content": "Be brief."}
    assert messages("{% if m.role == 'developer' %}{% endif %}", told) == [told]
    assert messages("", told) == [told | {"role": "system"}]
    with pytest.raises(ApiError, match="'control' is not among system, developer, user"):
        messages("{{ messages }}", given)


def test_names_of_tools(smol: Running) -> None:
    for name in ("a" * 128, "ns:tool", "server/tool.v1"):
        tool = {"type": "function", "function": {"name": name}}
        assert name in prompt_of(smol, tools=[tool])
    with smol.client() as http:
        tool = {"type": "function", "function": {"name": "a" * 129}}
        body = {"messages": HELLO, "tools": [tool]}
        assert http.post(CHAT, json=body).json()["error"]["param"] == "tools.0.function.name"
