"""All fields for thinking have the same effect."""

from types import SimpleNamespace
from typing import Any

import pytest

from jinfer.loader.sources import SourceError
from jinfer.modelspec.model_spec import PromptSpec
from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.thinking_choice import UNLIMITED, ThinkingChoice, choose_thinking
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.request_body import validated
from jinfer.server.serve_flags import model_sources_of, parse_options, server_settings_of
from jinfer.template.chat_prompt import Conversation
from jinfer.template.thinking_marks import THINKING_MARKS

SWITCH = "{% if enable_thinking %}<think>{% endif %}"
EFFORT = "{{ reasoning_effort }}"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def choose(
    body: dict[str, Any], template: str = SWITCH, *, marks: bool = True, **defaults: Any
) -> ThinkingChoice:
    asked = validated({"messages": [{"role": "user", "content": "a"}], **body}, ChatRequest)
    opened: Any = SimpleNamespace(
        thinking=THINKING_MARKS[0] if marks else None, defaults=defaults, conversation=None
    )
    return choose_thinking(asked, Conversation(PromptSpec(), template), opened)


@pytest.mark.parametrize(
    ("off", "field"),
    [
        ({"enable_thinking": False}, "enable_thinking"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.type"),
        ({"reasoning": {"enabled": False}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs.enable_thinking"),
    ],
)  # fmt: skip
def test_off(off: dict[str, Any], field: str) -> None:
    chosen = choose(off)
    assert (chosen.variables, chosen.budget, chosen.unused) == (OFF, None, {})
    # Without a variable, the thought ends where it begins.
    chosen = choose(off, "<think>")
    assert (chosen.variables, chosen.budget, chosen.budget_field) == ({}, 0, field)
    assert not chosen.unused
    chosen = choose(off, "{{ messages }}", marks=False)
    assert chosen.budget is None
    told = {} if field.startswith("chat_template_kwargs") else {field}
    assert chosen.unused.keys() == set(told)


def test_on() -> None:
    for on in ({"enable_thinking": True}, {"thinking": {"type": "enabled"}}):
        assert choose(on).variables == ON
        assert choose(on, thinking_token_budget=0).variables == ON
        assert len(choose(on, EFFORT).unused) == 1
    assert choose({"thinking": {"type": "auto"}}).variables == {}
    assert choose({"reasoning": {"effort": "low"}}, EFFORT).variables == {"reasoning_effort": "low"}
    # How much is told; that it thinks is followed.
    low = choose({"reasoning_effort": "low"})
    assert (low.variables, [*low.unused]) == (ON, ["reasoning_effort"])


def test_budgets() -> None:
    assert choose({"reasoning": {"max_tokens": 9}}).budget == 9
    given = choose({"thinking": {"type": "enabled", "budget_tokens": -1}})
    assert (given.budget, given.variables) == (UNLIMITED, ON)
    assert choose({"thinking": {"type": "auto", "budget_tokens": 5}}).budget == 5
    unknown = choose({"reasoning": {"max_tokens": 9}}, marks=False)
    assert (unknown.budget, [*unknown.unused]) == (None, ["reasoning.max_tokens"])
    for none in ({"thinking_token_budget": 0}, {"reasoning": {"max_tokens": 0}}):
        assert choose(none).variables == OFF
    assert choose({}, thinking_token_budget=0).variables == OFF
    assert choose({"thinking_token_budget": 7}, thinking_token_budget=0).variables == {}


@pytest.mark.parametrize(
    "both",
    [
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"reasoning_effort": "none", "reasoning": {"enabled": True}},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"reasoning": {"max_tokens": 5}, "thinking": {"type": "enabled", "budget_tokens": 6}},
    ],
)
def test_two_that_differ(both: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="contradict each other"):
        choose(both)


def test_flags() -> None:
    flags = ["m", "--reasoning-budget", "5", "--reasoning-budget-message", "So."]
    given = parse_options([*flags, "--chat-template-kwargs", '{"enable_thinking": false}'], {})
    (source,) = model_sources_of(given)
    budget = {"thinking_token_budget": 5, "thinking_budget_message": "So."}
    assert source.overrides["generation"] == budget
    assert server_settings_of(given).template_variables == OFF
    unlimited = parse_options(["m", "--reasoning-budget", "-1"], {})
    assert "generation" not in model_sources_of(unlimited)[0].overrides
    for variables in ("5", '{"messages": []}', "{"):
        with pytest.raises(SourceError):
            parse_options(["m"], {"JINFER_CHAT_TEMPLATE_KWARGS": variables})
