"""Thoughts, through openai-python, alone and before calls."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import Running
from tests.server.tool_models import (
    ASKED,
    CHATML,
    TemplateOf,
    arguments_of,
    create,
    serving_templates,
)

TEMPLATES: list[TemplateOf] = [
    ("thinking", CHATML + "{# </think> #}", {}),
    ("always", CHATML.replace("enable_thinking", "true"), {"reasoning": "think"}),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_templates(tmp_path_factory.mktemp("tiny"), TEMPLATES) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        yield client


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
    """Every field for a budget ends the thought there, and the answer continues."""
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
    end = running.model("always").session.tokenizer.encode("</think>", special=False)
    assert tokens[4 : 4 + len(end)] == end
    chunks = list(create(client, **given, extra_body=asked[0], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == message.content
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
    assert [item.type for item in said.output] == ["reasoning", "message"]
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
            item.choices[0].delta for item in create(client, **given, extra_body=body, stream=True)
        ]
        assert "".join(piece.content or "" for piece in pieces) == shown.content
        assert not any("reasoning_content" in (piece.model_extra or {}) for piece in pieces)


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
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text
