"""What a chat template makes of messages' contents: which form it reads, and what it leaves out.

A content is a text. Some templates read only lists of parts, `{"type": "text", "text": ...}`, and
print nothing for a text. So the first form that shows all that is said is taken (vLLM's
`--chat-template-content-format auto` and llama.cpp's capabilities of templates do the same).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinfer.template.template_errors import TemplateError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
Form = Callable[[Sequence[Message]], Sequence[Message]]

_WORDS = "jinferasksforthis"  # what could be said, and no template changes but to capitals
_SHORT = 4  # letters of words that a template may have by itself
_MISSES = 16  # words looked for in vain, each through the whole text
# What takes a content's parts: a loop, a number, a filter of lists.
_PARTS = re.compile(
    r"\bfor\s+\w+\s+in\s+[^%]*\bcontent\b|\bcontent['\"\]\s]*"
    r"(?:\[\s*-?\d|\|\s*(?:first|last|map|selectattr)\b)"
)
_ANSWERS = "assistant"  # whose thoughts and words beside calls templates leave out on purpose


def rendered(
    render: Render, messages: Sequence[Message], source: str, *, answered: bool = False
) -> tuple[Sequence[Message], str]:
    """The messages in the form that a template reads, and what it makes of them.

    Args:
        render: renders messages.
        source: the template.
        answered: nothing is wanted of the model. A system message may be left out then: some
            templates write it before the last question, if that is the last message.

    Raises:
        TemplateError: it refuses them, or leaves out what is said, in whatever form.
    """
    forms: list[Form] = [_as_given]
    if _PARTS.search(source):
        forms += [_as_parts, _system_as_text]
    complaint: TemplateError | None = None
    for form in forms:
        asked = form(messages)
        if form is not _as_given and asked == messages:
            continue
        try:
            text = render(asked)
        except TemplateError as error:
            complaint = complaint or error
            continue
        lost = _left_out(render, asked, text)
        if answered:
            lost = [number for number in lost if asked[number].get("role") != "system"]
        if not lost:
            return asked, text
        complaint = complaint or TemplateError(_complaint(messages, lost))
    assert complaint is not None
    raise complaint


def _as_given(messages: Sequence[Message]) -> Sequence[Message]:
    return messages


def _as_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """Texts as lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _system_as_text(messages: Sequence[Message]) -> Sequence[Message]:
    """As many templates have it that put a system message into another."""
    parts = _as_parts(messages)
    return [
        given if given.get("role") == "system" else part
        for given, part in zip(messages, parts, strict=True)
    ]


def _left_out(render: Render, messages: Sequence[Message], text: str) -> list[int]:
    """The messages of which a template shows nothing, the model's own ones aside.

    It may trim, quote, move or cut words. So where they are not found as they are, in their order,
    others in their place tell.
    """
    asked: dict[int, str] = {}
    place = misses = 0
    for number, message in enumerate(messages):
        words = [] if message.get("role") == _ANSWERS else _texts(message.get("content"))
        for each in words:
            wanted = len(each.strip()) >= _SHORT and misses < _MISSES
            at = text.find(each, place) if wanted else -1
            if at < 0:
                asked[number] = f"{_WORDS}{number}x"
                misses += wanted
            else:
                place = at + len(each)
    if not asked:
        return []
    others = [
        {**message, "content": _saying(message.get("content"), asked[number])}
        if number in asked
        else message
        for number, message in enumerate(messages)
    ]
    try:
        probed = render(others).casefold()
    except TemplateError:  # it wants other words
        return []
    return [number for number, words in asked.items() if words not in probed]


def _texts(content: Any) -> list[str]:
    """What a message says, in one text or several parts."""
    if isinstance(content, str):
        return [content] if content.strip() else []
    if not isinstance(content, list | tuple):
        return []
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _saying(content: Any, words: str) -> Any:
    """A content of the same form that says other words."""
    if isinstance(content, str):
        return words
    return [
        {**part, "text": words} if isinstance(part, Mapping) and "text" in part else part
        for part in content
    ]


def _complaint(messages: Sequence[Message], lost: Sequence[int]) -> str:
    message = messages[lost[-1]]
    role = message.get("role")
    form = "a text" if isinstance(message.get("content"), str) else "a list"
    if role == "user":
        return (
            f"the chat template leaves out a user's content that is {form}: what the user says "
            f"would be lost; set prompt.template or prompt.chat_template"
        )
    return (
        f"the chat template leaves out message {lost[-1]}, of the role {role!r}: what it says "
        f"would be lost; put it elsewhere, as into a message of the user"
    )
