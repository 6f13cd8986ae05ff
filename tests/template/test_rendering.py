"""Which template renders a conversation, where an answer goes on, and what templates drop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec.model_spec import PromptSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_files import with_families
from jinfer.template import TemplateError
from jinfer.template.chat_prompt import Conversation
from jinfer.tokenizer import Tokenizer, load_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
TEMPLATES: dict[str, str] = json.loads((GOLDENS / "tok_chat/expected.json").read_text("utf-8"))[
    "templates"
]
DIMS = {"vocab": 100, "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 4, "intermediate": 64}
USER: dict[str, Any] = {"role": "user", "content": "How are you?"}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def found() -> Tokenizer:
    tokenizer = load_tokenizer(GOLDENS / "tok_gpt2")
    assert tokenizer is not None
    return tokenizer


def talk(template: str, **values: Any) -> Conversation:
    return Conversation(PromptSpec(), template, **values)


def opened(source: Path, config: dict[str, Any]) -> Conversation:
    tables = with_families({"family": "llama", "dims": DIMS}, source)
    return Conversation.of(resolve(tables, "here", CheckpointFacts(), {}), source, config)


PLAIN = "plain {{ messages[0].content }}"
WITH_TOOLS = "{{ tools[0].function.name }} {{ messages[0].content }}"
NAMED = {
    "chat_template": [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": WITH_TOOLS},
    ]
}


@pytest.mark.parametrize("where", ["tokenizer_config", "chat_template", "additional", "gguf"])
def test_the_template_for_conversations_with_tools(
    where: str, found: Tokenizer, tmp_path: Path
) -> None:
    """As transformers chooses of several templates, and llama.cpp of GGUF's."""
    config: dict[str, Any] = {}
    match where:
        case "gguf":
            key = "tokenizer.chat_template"
            config = {"general.architecture": "llama", key: PLAIN, key + ".tool_use": WITH_TOOLS}
        case "additional":
            (tmp_path / "chat_template.jinja").write_text(PLAIN)
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(WITH_TOOLS)
        case _:
            (tmp_path / f"{where}.json").write_text(json.dumps(NAMED))
    conversation = opened(tmp_path, config)
    assert conversation.text(found, [USER]) == "plain How are you?"
    assert conversation.text(found, [USER], tools=[]) == "plain How are you?"
    assert conversation.text(found, [USER], tools=TOOLS) == "weather How are you?"
    ids = conversation.encode(found, [USER], tools=TOOLS)
    assert found.decode(ids) == "weather How are you?"
    assert conversation.for_tools().reads("tools")


def test_tools_and_documents_without_a_place(found: Tokenizer) -> None:
    for name in ("tools", "documents"):
        given: dict[str, Any] = {name: [{}]}
        with pytest.raises(TemplateError, match=f"chat template has no place for {name}"):
            talk(PLAIN).encode(found, [USER], **given)
        given[name] = None
        assert talk(PLAIN).encode(found, [USER], **given)
    own = Conversation(PromptSpec(template="{query}"), None)
    with pytest.raises(TemplateError, match="has no place for tools"):
        own.encode(found, [USER], tools=TOOLS)


SAID = ("i", "<", "end", "assistant", "The answer is ", "1, 2,\n", "<|im_end|", "How are you?", "")


@pytest.mark.parametrize("stated", SAID)
def test_an_answer_goes_on_where_it_ended(stated: str, found: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": stated}]
    before = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    text = talk(CHATML).text(found, messages, continue_final_message=True)
    assert text == before + stated
    ids = talk(CHATML).encode(found, messages, continue_final_message=True, special=True)
    assert found.decode(ids, skip_special=False) == text
    if not stated:
        silent = [USER, {"role": "assistant", "content": None}]
        assert talk(CHATML).text(found, silent, continue_final_message=True) == before


TRIMMED = CHATML.replace("m.content }}", "m.content | trim }}")
THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% set c = m.content %}{% if '</think>' in c %}<think>{{ c.split('</think>')[0] }}</think>\n"
    "{% set c = c.split('</think>')[1] %}{% endif %}{{ c | trim }}",
)


@pytest.mark.parametrize(
    ("template", "stated", "shown"),
    [
        (TRIMMED, "The answer is ", "The answer is "),
        (TRIMMED, " \n The", "The"),  # as in the prompt of a whole answer
        (TRIMMED, " ", ""),
        (THINKING, "Hm</think>  I ", "<think>Hm</think>\nI "),
        (THINKING, "Hm", "Hm"),
    ],
)
def test_templates_change_a_continued_answer(
    template: str, stated: str, shown: str, found: Tokenizer
) -> None:
    messages = [USER, {"role": "assistant", "content": stated}]
    text = talk(template).text(found, messages, continue_final_message=True)
    assert text.rpartition("assistant\n")[2] == shown


def test_answer_that_the_template_drops(found: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="does not show the last message as it is"):
        talk("{{ messages[0].content }}").text(
            found, [USER, {"role": "assistant", "content": "I"}], continue_final_message=True
        )


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_real_templates_go_on(name: str, found: Tokenizer) -> None:
    """With other words in its place, the text is the same up to there."""

    def before(stated: str) -> str:
        last = {"role": "assistant", "content": stated}
        given = {"bos_token": "<s>", "eos_token": "</s>", "continue_final_message": True}
        try:
            text = talk(TEMPLATES[name]).text(found, [USER, last], **given)
        except TemplateError:
            return "refused"
        return text.removesuffix(stated)

    assert before("i") == before("Because the ") == before("q")


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
STRICT = PARTS.replace("{% endif %}", "{% else %}{{ raise_exception('what is it?') }}{% endif %}")
SYSTEM = (
    "{{ messages[0].content + '!' if messages[0].role == 'system' else '' }}"
    "{% for m in messages if m.role != 'system' %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)

INDEXED = "Be brief.|How are you?|Well.|Good|"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PARTS, "[system]Be brief.[user]How are you?[assistant]Well.[user]Good"),
        (STRICT, "[system]Be brief.[user]How are you?[assistant]Well.[user]Good"),
        (SYSTEM, "Be brief.!How are you?Well.Good"),
        ("{% for m in messages %}{{ m.content[0].text }}|{% endfor %}", INDEXED),
        ("{% for m in messages %}{{ m['content'][0]['text'] }}|{% endfor %}", INDEXED),
        ("{% for m in messages %}{{ (m.content | first).text }}|{% endfor %}", INDEXED),
        (
            "{% for m in messages %}{{ m['content'] | map(attribute='text') | join }}|{% endfor %}",
            INDEXED,
        ),
    ],
)
def test_templates_that_need_content_parts(template: str, text: str, found: Tokenizer) -> None:
    stated = ["Be brief.", "How are you?", "Well.", "Good"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, stated, strict=True)]
    assert talk(template).text(found, messages) == text
    assert found.decode(talk(template).encode(found, messages)) == text
    going_on = talk(template).text(found, messages[:-1], continue_final_message=True)
    assert going_on == text.partition("Well.")[0] + "Well."


def test_special_tokens_in_parts_are_text(found: Tokenizer) -> None:
    end, id = list(found.special.control.items())[-1]
    message = {"role": "user", "content": f"Hi there {end}"}
    assert id not in talk(PARTS).encode(found, [message])
    assert id in talk(PARTS).encode(found, [message], special=True)


FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
)
LAST_ONLY = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"


def test_messages_that_a_template_drops(found: Tokenizer) -> None:
    system = {"role": "system", "content": "Answer in French."}
    answer = {"role": "assistant", "content": "Well."}
    first = talk(FIRST_ONLY)
    assert first.text(found, [system, USER]) == "<<Answer in French.>>How are you?"
    wrong = r"leaves out message 2, of the role 'system': what it says would be lost; put it else"
    with pytest.raises(TemplateError, match=wrong):
        first.encode(found, [USER, answer, system, USER])
    with pytest.raises(TemplateError, match="leaves out message 0, of the role 'system'"):
        talk(LAST_ONLY).encode(found, [system, USER])
    with pytest.raises(TemplateError, match="leaves out a user's content that is a text"):
        talk(LAST_ONLY).encode(found, [USER, answer, {"role": "user", "content": "And now?"}])
    # Short words that the template has by itself are no proof; its own turns it may leave out.
    with pytest.raises(TemplateError, match="leaves out message 0, of the role 'system'"):
        talk("hi " + LAST_ONLY).encode(found, [{**system, "content": "hi"}, USER])
    assert talk(LAST_ONLY).text(found, [answer, USER]) == "How are you?"
    tool = {"role": "tool", "content": '{"degrees": 21}'}
    quoted = talk("{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    assert quoted.text(found, [USER, tool]) == '"How are you?""{\\"degrees\\": 21}"'
    with pytest.raises(TemplateError, match="leaves out message 0, of the role 'tool'"):
        talk(LAST_ONLY).encode(found, [tool, USER])


def test_a_developers_message_is_a_system_message_where_the_role_is_unknown(
    found: Tokenizer,
) -> None:
    messages = [{"role": "developer", "content": "Answer in French."}, USER]
    assert talk(FIRST_ONLY).text(found, messages) == "<<Answer in French.>>How are you?"
    knows = "{% for m in messages %}{{ m.role }}{# developer #}: {{ m.content }} {% endfor %}"
    assert talk(knows).text(found, messages).startswith("developer: ")


def test_roles_by_their_first_word(found: Tokenizer) -> None:
    """Granite has "document 1"."""
    split = (
        "{% for m in messages %}{% set r = m['role'].split(' ') %}"
        "{% if r[0] == 'document' %}#{{ r[1] }} {% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "document 1", "content": "Rome is old. "}, USER]
    assert talk(split).text(found, messages) == "#1 Rome is old. How are you?"
    with pytest.raises(TemplateError, match="message 0 has the role 'documents 1', which is none"):
        talk(split).text(found, [{**messages[0], "role": "documents 1"}, USER])
    with pytest.raises(TemplateError, match="message 0 has the role 'document 1', which is none"):
        talk("{# document #}" + LAST_ONLY).text(found, messages)
