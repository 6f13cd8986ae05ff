"""Which roles' contents a chat template wants as lists of parts.

Templates of models that also see read `{"type": "text", "text": …}` from a list. Most take a text
in its place too; of those that do not, a text's letters would be parts without a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinfer.template.errors import TemplateError

type Messages = Sequence[Mapping[str, Any]]

_LOOP = re.compile(r"{%[-+]?\s*for\b")
_WORD = "einundvierzig"


def roles_in_parts(source: str, render: Callable[[Messages], str]) -> frozenset[str]:
    """The roles whose contents have to be lists.

    Args:
        source: the template's text.
        render: gives the prompt of messages. Raises `TemplateError`.
    """
    if len(_LOOP.findall(source)) < 2:  # one is over the messages
        return frozenset()
    user = {"role": "user", "content": _WORD}
    if not _wants(render, [], user):
        return frozenset()
    asked = [_in_parts({**user, "content": "?"})]
    function = {"name": "f", "arguments": {}}
    call = {"id": "a1b2c3d4e", "type": "function", "function": function}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    others: dict[str, Messages] = {"assistant": asked, "tool": [*asked, calling]}
    found = {role for role, before in others.items() if _wants(render, before, _of(role))}
    # A system message stands at the beginning.
    if _wants(render, [], _of("system"), asked):
        found.add("system")
    return frozenset({"user", *found})


def lost(messages: Messages, prompt: str) -> bool:
    """Whether what a user says in a text is not in a prompt, at least not as it is."""
    users = [one.get("content") for one in messages if one.get("role") == "user"]
    said = users[-1] if users else None
    return isinstance(said, str) and bool(said.strip()) and said.strip() not in prompt


def in_parts(messages: Messages, roles: Collection[Any]) -> list[Mapping[str, Any]]:
    """Messages with lists of parts for the texts of some roles."""
    return [_in_parts(one) if one.get("role") in roles else one for one in messages]


def _of(role: str) -> dict[str, Any]:
    return {"role": role, "content": _WORD, "tool_call_id": "a1b2c3d4e", "name": "f"}


def _wants(
    render: Callable[[Messages], str],
    before: Messages,
    one: Mapping[str, Any],
    after: Messages = (),
) -> bool:
    """Whether a message is shown as a list only."""

    def shows(message: Mapping[str, Any]) -> bool:
        try:
            return _WORD in render([*before, message, *after])
        except TemplateError:
            return False

    return not shows(one) and shows(_in_parts(one))


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}
