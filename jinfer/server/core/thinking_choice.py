"""Thinking choice: whether the model thinks about a request, how hard, and for how many tokens.

Clients have many fields for it. A variable of the chat template turns thinking on or off; without
such a variable, a budget of 0 turns it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.loader.open_model import Opened
from jinfer.modelspec.bounded_types import MAX_INDEX
from jinfer.sampling.sampling_params import PARAMETERS
from jinfer.server.core.chat_schemas import ChatTemplateFields
from jinfer.server.http.http_errors import invalid_request
from jinfer.template.chat_prompt import Conversation
from jinfer.template.thinking_marks import thinking_switches

UNLIMITED = -1
_NONE = "none"  # the effort of a model that does not think
BUDGET = "thinking_token_budget"
_BUDGET_FIELDS = PARAMETERS[BUDGET].fields
_KWARGS = "chat_template_kwargs"
_NO_MARKS = "the model does not mark its thoughts in a known way"


@dataclass(frozen=True)
class ThinkingChoice:
    """Whether, how hard and how long the model thinks.

    Attributes:
        variables: variables of the chat template.
        budget: tokens of thought; `UNLIMITED`; None: the sampling parameters set it.
        budget_field: the request's field that sets the budget.
        unused: fields without effect -> the reason.
        followed: template variables that have an effect although the template does not read them.
    """

    variables: Mapping[str, Any]
    budget: int | None = None
    budget_field: str = BUDGET
    unused: Mapping[str, str] = field(default_factory=dict)
    followed: frozenset[str] = frozenset()


def choose_thinking(
    chat: ChatTemplateFields, template: Conversation, opened: Opened
) -> ThinkingChoice:
    """Read all fields about thinking.

    Args:
        template: the chat template of the request.

    Raises:
        ApiError: two fields contradict each other, or a budget is out of range.
    """
    switches = thinking_switches(template.jinja or "")
    variables: dict[str, Any] = {}
    unused = {} if opened.thinking is not None else _unused_budgets(chat)
    effort_field, effort = _agreed({**_efforts(chat)})
    off = {effort_field: False} if effort == _NONE else {}
    switch_field, switch = _agreed({**_switches(chat), **off})
    budget_field, budget = _agreed(_budgets(chat))
    if budget is not None and opened.thinking is None:
        unused[budget_field] = _NO_MARKS
        budget = None
    if effort not in (None, _NONE):
        if template.reads("reasoning_effort"):
            variables["reasoning_effort"] = effort
        else:
            unused[effort_field] = "the model's chat template does not read reasoning_effort"
            if switch is None:
                variables |= dict.fromkeys(switches, True)
    if switch is None:
        default = opened.defaults.get(BUDGET) if budget is None else budget
        budgets = (getattr(chat, name, None) for name in _BUDGET_FIELDS)
        own = next((value for value in budgets if value is not None), None)
        if (default if own is None else own) == 0:
            variables |= dict.fromkeys(switches, False)
    elif switches:
        variables |= dict.fromkeys(switches, switch)
    elif not switch and opened.thinking is not None:
        followed = frozenset({switch_field.removeprefix(f"{_KWARGS}.")})
        return ThinkingChoice(variables, 0, switch_field, unused, followed)
    elif not switch_field.startswith(_KWARGS):
        unused[switch_field] = "the model's chat template does not turn thinking on or off"
    return ThinkingChoice(variables, budget, budget_field, unused)


def _unused_budgets(chat: ChatTemplateFields) -> dict[str, str]:
    """Return the sampling fields with a budget, for a model that does not mark its thoughts."""
    unused = {}
    for name in _BUDGET_FIELDS:
        value = getattr(chat, name, None)
        if value is None:
            continue
        if isinstance(value, int) and not UNLIMITED <= value <= MAX_INDEX:
            raise invalid_request(f"{name} is {value}; give a number of tokens from -1", name)
        unused[name] = _NO_MARKS
    return unused


def _switches(chat: ChatTemplateFields) -> dict[str, bool | None]:
    """Return the values of the fields that turn thinking on or off."""
    kwargs = chat.chat_template_kwargs or {}
    kind = None if chat.thinking is None else chat.thinking.type
    named = {f"{_KWARGS}.{name}": kwargs.get(name) for name in ("enable_thinking", "thinking")}
    return {
        **{name: value for name, value in named.items() if isinstance(value, bool)},
        "enable_thinking": chat.enable_thinking,
        "thinking.type": None if kind in (None, "auto") else kind != "disabled",
        "reasoning.enabled": None if chat.reasoning is None else chat.reasoning.enabled,
    }


def _efforts(chat: ChatTemplateFields) -> dict[str, str | None]:
    nested = None if chat.reasoning is None else chat.reasoning.effort
    return {"reasoning_effort": chat.reasoning_effort, "reasoning.effort": nested}


def _budgets(chat: ChatTemplateFields) -> dict[str, int | None]:
    thinks = chat.thinking is not None and chat.thinking.type != "disabled"
    return {
        "reasoning.max_tokens": None if chat.reasoning is None else chat.reasoning.max_tokens,
        "thinking.budget_tokens": chat.thinking.budget_tokens if thinks and chat.thinking else None,
    }


def _agreed(values: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the first field with a value, and the value; or ("", None).

    Raises:
        ApiError: two fields have different values.
    """
    set_fields = [(name, value) for name, value in values.items() if value is not None]
    for name, value in set_fields[1:]:
        if value != set_fields[0][1]:
            raise invalid_request(f"{set_fields[0][0]} and {name} contradict each other", name)
    return set_fields[0] if set_fields else ("", None)
