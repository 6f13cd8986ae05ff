"""Images in chat templates: which form shows them, and that no text of a user becomes an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec.image_table import CentreCropSpec, ImageLayoutSpec, ImageSpec
from jinfer.modelspec.model_spec import PromptSpec
from jinfer.template import TemplateError
from jinfer.template.chat_prompt import Conversation
from jinfer.template.message_content import IMAGE
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.tokenizer_base import MARK

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZE = CentreCropSpec("centre_crop", 4, 4)
SPEC = ImageSpec("<image>", SIZE, 2)
PICTURE: dict[str, Any] = {"type": "image"}

PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %};{% endfor %}"
)
TEXTS_OF_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.content %}{{ c.text }}{% endfor %};"
    "{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TRIMMED = "{% for m in messages %}{{ m.role }}:{{ m.content.strip() }};{% endfor %}"


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture(scope="module")
def found() -> Tokenizer:
    tokenizer = load_tokenizer(GOLDENS / "vlm_smolvlm")
    assert tokenizer is not None
    return tokenizer


def talk(template: str, layout: ImageLayoutSpec | None = None) -> Conversation:
    image = ImageSpec("<image>", SIZE, 2, layout=layout or ImageLayoutSpec())
    return Conversation(PromptSpec(), template, image=image)


@pytest.mark.parametrize(
    ("template", "between"),
    [(PARTS, ""), (PARTS_ONLY, ""), (STRINGS, "\n"), (TRIMMED, "\n"), (TEXTS_OF_PARTS, "\n")],
)
def test_each_image_is_a_marker_at_its_place(template: str, between: str, found: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Look."},
        *user(text("a"), PICTURE, text("b"), PICTURE),
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    rendered = talk(template).marked_text(found, messages)
    content = between.join(["a", "<image>", "b", "<image>"])
    assert rendered == f"system:Look.;user:{content};assistant:c;user:d;"


@pytest.mark.parametrize("template", [PARTS, STRINGS])
@pytest.mark.parametrize("written", ["<image>", "<<image>image>", "an <image> here"])
def test_a_marker_that_a_user_writes_is_hidden(
    template: str, written: str, found: Tokenizer
) -> None:
    conversation = talk(template)
    alone = [{"role": "user", "content": written}]
    assert conversation.marked_text(found, alone).replace(MARK, "") == f"user:{written};"
    assert found.id("<image>") not in conversation.encode(found, alone)
    rendered = conversation.marked_text(found, user(text(written), PICTURE, text(written)))
    assert rendered.count("<image>") == 1
    between = "\n" if template == STRINGS else ""
    expected = between.join([written, "<image>", written])
    assert rendered.replace(MARK, "") == f"user:{expected};"


def test_a_marker_that_is_no_special_token_is_hidden(found: Tokenizer) -> None:
    layout = ImageLayoutSpec(marker="(picture)")
    template = PARTS.replace("<image>", "(picture)")
    messages = user(text("a (picture)"), PICTURE)
    rendered = talk(template, layout).marked_text(found, messages)
    assert rendered.count("(picture)") == 1
    assert rendered.replace(MARK, "") == "user:a (picture)(picture);"


def test_special_tokens_of_trusted_messages(found: Tokenizer) -> None:
    message = [{"role": "user", "content": "<image>"}]
    assert talk(PARTS).marked_text(found, message, special=True) == "user:<image>;"


def test_a_model_that_sees_no_images(found: Tokenizer) -> None:
    for conversation in (
        Conversation(PromptSpec(), PARTS),
        Conversation(PromptSpec(template="{query}"), None),
    ):
        with pytest.raises(TemplateError, match="cannot see images"):
            conversation.marked_text(found, user(PICTURE))


def test_a_prompt_template_has_no_place_for_images(found: Tokenizer) -> None:
    conversation = Conversation(PromptSpec(template="{query}"), None, image=SPEC)
    with pytest.raises(TemplateError, match="no place for images"):
        conversation.marked_text(found, user(PICTURE))


def test_a_template_that_leaves_images_out(found: Tokenizer) -> None:
    for template in (STRINGS.replace("m.content", "m.content[:3]"), "{{ messages[0].role }}"):
        with pytest.raises(TemplateError, match="leaves out"):
            talk(template).marked_text(found, user(text("abcd"), PICTURE))


def test_the_text_of_a_prompt_has_markers(found: Tokenizer) -> None:
    for template in (PARTS, STRINGS):
        shown = talk(template).text(found, user(PICTURE))
        assert shown == "user:<image>;"
        assert IMAGE not in shown
