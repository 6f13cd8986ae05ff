"""Templates that want contents as lists of parts get them, from texts too."""

from typing import Any

import pytest

from jinfer.template import ChatTemplate, TemplateError

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = PARTS.replace("{{ p.text }}", "{{ p['text'] | trim }}").replace(
    "{% for p in m.content %}",
    "{% if m.content is string %}{{ raise_exception('a list!') }}{% endif %}"
    "{% for p in m.content %}",
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Oh!"},
]
SHOWN = "<system>Be brief.<user>Why?<assistant>So.<user>Oh!"


@pytest.mark.parametrize("source", [PARTS, USERS, STRICT, BOTH])
def test_texts(source: str) -> None:
    template = ChatTemplate(source)
    for _ in range(2):
        assert template.render(TALK) == SHOWN


def test_lists_stay_as_they_are() -> None:
    users = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    assert ChatTemplate(PARTS).render(users) == "<user>Why?"
    assert ChatTemplate(BOTH).render(users) == "<user>[Why?]"


def test_what_is_lost_either_way() -> None:
    nothing = "{% for m in messages %}{% for p in m.parts %}{{ p }}{% endfor %}!{% endfor %}"
    assert ChatTemplate(nothing).render(TALK) == "!!!!"
    never = "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="never"):
        ChatTemplate(never + "{{ raise_exception('never') }}").render(TALK)
