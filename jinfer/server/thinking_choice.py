"""Thinking of a request: whether the model thinks, with which effort, and within which budget.

Clients say it in many words. Whether a model thinks is a variable of its chat template; where there
is none, a budget of 0 turns thinking off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.modelspec.field_types import MAX_INDEX
from jinfer.opening.chat_prompt import Conversation
from jinfer.opening.open_model import Opened
from jinfer.sampling.sampling_params import PARAMETERS
from jinfer.server.http_errors import invalid_request
from jinfer.server.ignored_fields import Ignore
from jinfer.server.schemas.chat import ChatTemplateFields
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.template.thinking_marks import thinking_switches

UNLIMITED = -1
_NONE = "none"  # the effort of a model that does not think
_BUDGET = "thinking_token_budget"
_FIELDS = PARAMETERS[_BUDGET].fields
_KWARGS = "chat_template_kwargs"
_NO_THOUGHTS = "the model writes no marks of thoughts that are known"


@dataclass(frozen=True)
class ThinkingChoice:
    """How a request wants the model to think.

    Attributes:
        variables: of the chat template.
        budget: tokens of thought; `UNLIMITED`; None: what sampling parameters say.
        budget_field: the request's field that says it.
        unused: fields that change nothing -> why.
        followed: variables that are followed though the template does not read them.
    """

    variables: Mapping[str, Any]
    budget: int | None = None
    budget_field: str = _BUDGET
    unused: Mapping[str, str] = field(default_factory=dict)
    followed: frozenset[str] = frozenset()


def choose_thinking(
    body: ChatTemplateFields, conversation: Conversation, opened: Opened
) -> ThinkingChoice:
    """Reads all fields about thinking.

    Args:
        conversation: the chat template of the request.

    Raises:
        ApiError: two of them say different things.
    """
    template = conversation.jinja or ""
    switches = thinking_switches(template)
    variables: dict[str, Any] = {}
    unused: dict[str, str] = {}
    effort_field, effort = _one({**_efforts(body)})
    on_field, on = _one({**_switches(body), **({effort_field: False} if effort == _NONE else {})})
    budget_field, budget = _one(_budgets(body))
    if budget is not None and opened.thinking is None:
        unused[budget_field] = _NO_THOUGHTS
        budget = None
    if effort not in (None, _NONE):
        if conversation.reads("reasoning_effort"):
            variables["reasoning_effort"] = effort
        else:
            unused[effort_field] = "the model's chat template does not read reasoning_effort"
            if on is None:
                variables |= dict.fromkeys(switches, True)
    if on is None:
        default = opened.defaults.get(_BUDGET) if budget is None else budget
        own = next((one for one in map(body.given_fields().get, _FIELDS) if one is not None), None)
        if (default if own is None else own) == 0:
            variables |= dict.fromkeys(switches, False)
    elif switches:
        variables |= dict.fromkeys(switches, on)
    elif not on and opened.thinking is not None:
        followed = frozenset({on_field.removeprefix(f"{_KWARGS}.")})
        return ThinkingChoice(variables, 0, on_field, unused, followed)
    elif not on_field.startswith(_KWARGS):
        unused[on_field] = "the model's chat template does not turn thinking on or off"
    return ThinkingChoice(variables, budget, budget_field, unused)


def without_budget[B: SamplingFields](body: B, opened: Opened, ignore: Ignore) -> B:
    """The request without a budget, where the model has no thoughts that it could be of."""
    given = [name for name in _FIELDS if getattr(body, name) is not None]
    if opened.thinking is not None or not given:
        return body
    for name in given:
        value = getattr(body, name)
        if isinstance(value, int) and not UNLIMITED <= value <= MAX_INDEX:
            raise invalid_request(f"{name} is {value}; give a number of tokens from -1", name)
        ignore(name, _NO_THOUGHTS)
    return body.model_copy(update=dict.fromkeys(given))


def _switches(body: ChatTemplateFields) -> dict[str, bool | None]:
    """What the fields that turn thinking on or off say."""
    given = body.chat_template_kwargs or {}
    kind = None if body.thinking is None else body.thinking.type
    named = {f"{_KWARGS}.{name}": given.get(name) for name in ("enable_thinking", "thinking")}
    return {
        **{name: one for name, one in named.items() if isinstance(one, bool)},
        "enable_thinking": body.enable_thinking,
        "thinking.type": None if kind in (None, "auto") else kind != "disabled",
        "reasoning.enabled": None if body.reasoning is None else body.reasoning.enabled,
    }


def _efforts(body: ChatTemplateFields) -> dict[str, str | None]:
    nested = None if body.reasoning is None else body.reasoning.effort
    return {"reasoning_effort": body.reasoning_effort, "reasoning.effort": nested}


def _budgets(body: ChatTemplateFields) -> dict[str, int | None]:
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    return {
        "reasoning.max_tokens": None if body.reasoning is None else body.reasoning.max_tokens,
        "thinking.budget_tokens": body.thinking.budget_tokens if thinks and body.thinking else None,
    }


def _one(said: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that says something, and what; ("", None) if none does."""
    given = [(field, one) for field, one in said.items() if one is not None]
    for field_name, one in given[1:]:
        if one != given[0][1]:
            raise invalid_request(
                f"{given[0][0]} and {field_name} say different things", field_name
            )
    return given[0] if given else ("", None)
