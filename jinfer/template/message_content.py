"""Message content format: strings or lists of parts, as the chat template shows them completely.

Some templates read only lists of parts, `{"type": "text", "text": ...}`, and print nothing for a
string. So the first form that shows all content is used, as with vLLM's
`--chat-template-content-format auto` and llama.cpp's template capabilities. An image is a part
`{"type": "image"}`; in a string `IMAGE` marks its place.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinfer.template.template_errors import TemplateError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
Form = Callable[[Sequence[Message]], Sequence[Message]]

# Unknown to users, so that no text of theirs counts as an image.
IMAGE = "".join(map(chr, random.SystemRandom().choices(range(0xE000, 0xF900), k=8)))

NO_IMAGES = "the model cannot see images: it reads text alone; send text, or use a vision model"

_WORDS = "jinferasksforthis"  # a probe that templates change at most in case
_SHORT = 4  # letters of words that a template may contain by itself
_MISSES = 16  # failed searches, each through the whole text
# Constructs that treat content as a list: a loop, an index, a list filter.
_PARTS = re.compile(
    r"\bfor\s+\w+\s+in\s+[^%]*\bcontent\b|\bcontent['\"\]\s]*"
    r"(?:\[\s*-?\d|\|\s*(?:first|last|map|selectattr)\b)"
)
_ANSWERS = "assistant"  # templates omit its reasoning, and its text besides calls, on purpose


def render_complete(
    render: Render,
    messages: Sequence[Message],
    source: str,
    *,
    answered: bool = False,
    image_marker: str = "",
) -> tuple[Sequence[Message], str]:
    """Render messages in the form that a template reads; return that form and the prompt.

    Args:
        render: renders messages.
        source: the template.
        answered: no answer follows. Then a missing system message is accepted: some templates
            write it before the last question, if that is the last message.
        image_marker: what the template writes for an image; "": the model reads none.

    Raises:
        TemplateError: every form is rejected or leaves content out.
    """
    forms: list[Form] = [_as_given]
    if _PARTS.search(source):
        forms += [_as_parts, _system_as_text]
    images = sum(map(_count_images, messages))
    if images:
        if not image_marker:
            raise TemplateError(NO_IMAGES)
        forms.append(images_as_text)
        if _PARTS.search(source):
            forms.append(lambda given: _as_parts(images_as_text(given)))
    complaint: TemplateError | None = None
    for form in forms:
        formed = form(messages)
        if form is not _as_given and formed == messages:
            continue
        try:
            text = render(formed)
        except TemplateError as error:
            complaint = complaint or error
            continue
        lost = _left_out(render, formed, text)
        if answered:
            lost = [number for number in lost if formed[number].get("role") != "system"]
        if not lost and (not images or _shown_images(text, formed, image_marker) >= images):
            return formed, text
        reason = _complaint(messages, lost) if lost else "the chat template leaves out images"
        complaint = complaint or TemplateError(reason)
    assert complaint is not None
    raise complaint


def _as_given(messages: Sequence[Message]) -> Sequence[Message]:
    return messages


def _as_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """Turn strings into lists with one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _system_as_text(messages: Sequence[Message]) -> Sequence[Message]:
    """For templates that insert the system message into another message."""
    parts = _as_parts(messages)
    return [
        given if given.get("role") == "system" else part
        for given, part in zip(messages, parts, strict=True)
    ]


def images_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write images into the texts, for templates that read strings only."""
    return [
        {**message, "content": "\n".join(part.get("text", IMAGE) for part in message["content"])}
        if _count_images(message) and not isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _count_images(message: Message) -> int:
    content = message.get("content")
    if isinstance(content, str):
        return content.count(IMAGE)
    parts = content if isinstance(content, list | tuple) else ()
    return sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def _shown_images(text: str, messages: Sequence[Message], marker: str) -> int:
    """The images that a rendered text shows, without markers that messages have as text."""
    texts = (text for message in messages for text in _texts(message.get("content")))
    return text.count(IMAGE) + text.count(marker) - sum(text.count(marker) for text in texts)


def _left_out(render: Render, messages: Sequence[Message], text: str) -> list[int]:
    """The messages of which a template shows nothing, the assistant's aside.

    Templates may trim, quote, reorder or cut text. So messages that are not found verbatim, in
    order, are rendered again with a probe text.
    """
    probes: dict[int, str] = {}
    place = misses = 0
    for number, message in enumerate(messages):
        words = [] if message.get("role") == _ANSWERS else _texts(message.get("content"))
        for word in words:
            searched = len(word.strip()) >= _SHORT and misses < _MISSES
            at = text.find(word, place) if searched else -1
            if at < 0:
                probes[number] = f"{_WORDS}{number}x"
                misses += searched
            else:
                place = at + len(word)
    if not probes:
        return []
    others = [
        {**message, "content": _with_text(message.get("content"), probes[number])}
        if number in probes
        else message
        for number, message in enumerate(messages)
    ]
    try:
        probed = render(others).casefold()
    except TemplateError:  # it rejects the probe
        return []
    return [number for number, words in probes.items() if words not in probed]


def _texts(content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content] if content.strip() else []
    if not isinstance(content, list | tuple):
        return []
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _with_text(content: Any, words: str) -> Any:
    """The content in the same form with another text."""
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
