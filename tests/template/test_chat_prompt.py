"""Which prompt format counts: the specification's, the checkpoint's, or the fallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec.model_spec import PromptSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import with_families
from jinfer.template import PromptTemplate, TemplateError
from jinfer.template.chat_prompt import Conversation
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.tokenizer_base import MARK

GOLDENS = Path(__file__).parents[1] / "goldens"

DIMS = {"vocab": 100, "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 4, "intermediate": 64}
USER = [{"role": "user", "content": "Hi"}]
SAYS = "{{ messages[0].content }}"
GGUF = {"general.architecture": "llama", "tokenizer.chat_template": f"own {SAYS}"}


def tokenizer() -> Tokenizer:
    found = load_tokenizer(Path(__file__).parents[1] / "goldens" / "tok_gpt2")
    assert found is not None
    return found


def written(
    prompt: dict[str, str], source: Path, config: dict[str, Any] | None = None
) -> tuple[bool, str]:
    """Whether there is a template, and the prompt it gives."""
    tables = with_families({"family": "llama", "dims": DIMS, "prompt": prompt}, source)
    conversation = Conversation.of(
        resolve(tables, "here", CheckpointFacts(), {}), source, config if config is not None else {}
    )
    if not conversation.has_template:
        return False, ""
    return True, tokenizer().decode(conversation.encode(tokenizer(), USER))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({}, "own Hi"),
        ({"fallback": f"fallback {SAYS}"}, "own Hi"),
        ({"fallback": f"fallback {SAYS}", "chat_template": f"spec {SAYS}"}, "spec Hi"),
        ({"fallback": f"fallback {SAYS}", "template": "{query}!"}, "Hi!"),
    ],
)
def test_the_checkpoints_own_template_is_before_the_fallback(
    prompt: dict[str, str], text: str, tmp_path: Path
) -> None:
    assert written(prompt, tmp_path, GGUF) == (True, text)
    config = {"chat_template": f"own {SAYS}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert written(prompt, tmp_path) == (True, text)


@pytest.mark.parametrize("template", ["[INST] [/INST]", "{bos}{{query}}", "{query}{turn}{answer}"])
def test_a_template_without_a_place_for_the_user_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"here: prompt.template: has no \{query\}: what the user"):
        written({"template": template}, tmp_path)
    assert written({"template": f"{template.partition('{turn}')[0]}{{_question}}"}, tmp_path)[0]


@pytest.mark.parametrize("key", ["chat_template", "fallback"])
def test_a_jinja_template_that_never_uses_messages_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=rf"here: prompt.{key}: never uses messages: what the user"):
        written({key: "<|user|>{{ query }}"}, tmp_path)


PARTS = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
CAPITALS = "{{ messages[-1].content | upper | replace('HI ', 'HO ') }}"


@pytest.mark.parametrize(
    ("template", "content", "kept"),
    [
        ("chatml", "Hi", False),
        ("{{ messages | length }}", "Hi", False),
        ("{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}", "Hi", False),
        (PARTS, "Hi", True),
        (PARTS, [{"type": "text", "text": "Hi"}], True),
        ("{{ messages[0].content }}", [{"type": "mark"}, {"type": "text", "text": "Hi"}], True),
        ("{{ messages[0].role }}", [{"type": "mark"}, {"type": "text", "text": "Hi"}], False),
        ("{{ messages[0].role }}", "  ", True),
        ("{{ messages[0].role }}", None, True),
        ("{{ messages[0].content | trim }}", " Hi ", True),
        ("{{ messages[0].content | tojson }}", 'a "quoted" é', True),
        ("{{ messages[0].content.split('</think>')[-1] }}", "Hi </think>", True),
        (CAPITALS, "hi all", True),
        ("{% if messages[0].content != 'hi' %}{{ raise_exception('no') }}{% endif %}", "hi", True),
    ],
)
def test_a_template_that_drops_the_words_is_refused(
    template: str, content: Any, kept: bool, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    tables = with_families({"family": "llama", "dims": DIMS}, tmp_path)
    conversation = Conversation.of(resolve(tables, "here", CheckpointFacts(), {}), tmp_path, {})
    messages = [{"role": "user", "content": content}]
    if kept:
        conversation.encode(tokenizer(), messages)
        return
    form = "a text" if isinstance(content, str) else "a list"
    with pytest.raises(TemplateError, match=f"leaves out a user's content that is {form}: what"):
        conversation.encode(tokenizer(), messages)


def test_fallback_template_is_used_without_an_own_template(tmp_path: Path) -> None:
    assert written({}, tmp_path) == (False, "")
    assert written({"fallback": f"fallback {SAYS}"}, tmp_path) == (True, "fallback Hi")
    all_of_them = "{% for m in messages %}{{ m.content }}{% endfor %}?"
    assert written({"fallback": all_of_them, "system": "S"}, tmp_path)[1] == "SHi?"


def test_without_any_there_is_no_chat(tmp_path: Path) -> None:
    tables = with_families({"family": "llama", "dims": DIMS}, tmp_path)
    conversation = Conversation.of(resolve(tables, "here", CheckpointFacts(), {}), tmp_path, {})
    with pytest.raises(TemplateError, match="the model has no chat template; set prompt"):
        conversation.encode(tokenizer(), USER)


KINDS = ("tok_gpt2", "tok_llama3", "tok_spm_bpe", "tok_spm_unigram_t5", "tok_wordpiece")
TEMPLATE = "{% for m in messages %}{{ m.role }}\n{{ m.content | trim }}{{ end }}\n{% endfor %}"


def encoded(found: Tokenizer, template: str, content: str, **variables: Any) -> list[int]:
    tables = with_families(
        {"family": "llama", "dims": DIMS, "prompt": {"chat_template": template}}, Path("x")
    )
    conversation = Conversation.of(resolve(tables, "here", CheckpointFacts(), {}), Path("x"), {})
    return conversation.encode(found, [{"role": "user", "content": content}], **variables)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_messages_are_text(kind: str) -> None:
    found = load_tokenizer(GOLDENS / kind)
    assert found is not None
    end, id = list(found.special.control.items())[-1]
    words = f" a {end} b{end}{end} "
    ids = encoded(found, TEMPLATE, words, end=end)
    assert ids.count(id) == 1  # the template's own
    counted = encoded(found, TEMPLATE, words, end=end, special=True)
    assert counted.count(id) == 4
    shown = found.decode(ids).replace(" ", "").lower()
    assert words.replace(" ", "").lower() in shown or found.unk_id in ids


@pytest.mark.parametrize("kind", KINDS)
def test_text_around_a_hidden_token_keeps_its_ids(kind: str) -> None:
    """Text around the template's tokens is tokenized as without hidden tokens."""
    found = load_tokenizer(GOLDENS / kind)
    assert found is not None
    end, _ = list(found.special.control.items())[-1]
    usual = encoded(found, TEMPLATE + "Hello world", "x", end=end)
    marked = encoded(found, TEMPLATE + "Hello world", f"x {end}", end=end)
    tail = 1 + len(found.encode("Hello world", special=False)) // 2
    assert marked[-tail:] == usual[-tail:]


def test_placeholders_in_the_users_text() -> None:
    found = tokenizer()
    end, id = list(found.special.control.items())[-1]
    for words in (end[:-1] + end, end[0] + end + end[1:], MARK + end, end[0] + MARK + end[1:]):
        assert id not in encoded(found, "{{ messages[0].content }}", words)


def test_template_that_inspects_text_gets_it_unchanged() -> None:
    """Where hiding would change what it says, special tokens count, as they do without hiding."""
    found = tokenizer()
    end, id = list(found.special.control.items())[-1]
    template = "{{ messages[0].content|length }}{{ messages[0].content }}"
    ids = encoded(found, template, end)
    assert ids == found.encode(f"{len(end)}{end}", special=False)
    assert id in ids


def test_ordinary_conversations_keep_their_tokens() -> None:
    expected = json.loads((GOLDENS / "tok_chat/expected.json").read_text("utf-8"))
    cases = [case for case in expected["cases"] if case["error"] is None]
    assert len(cases) + sum(case["error"] is not None for case in expected["cases"]) == 186
    spoken = {}
    for name, source in expected["templates"].items():
        tables = with_families(
            {"family": "llama", "dims": DIMS, "prompt": {"chat_template": source}}, Path("x")
        )
        facts = resolve(tables, "here", CheckpointFacts(), {})
        spoken[name] = Conversation.of(facts, Path("x"), {})
    for kind in KINDS:
        found = load_tokenizer(GOLDENS / kind)
        assert found is not None
        for case in cases:
            given = {
                **expected["variables"],
                "tools": expected["tools"] if case["tools"] else None,
                "add_generation_prompt": case["add_generation_prompt"],
            }
            messages = expected["conversations"][case["conversation"]]
            ids = spoken[case["template"]].encode(found, messages, **given)
            assert ids == found.encode(case["expected"], special=False)


def test_unknown_roles_are_refused() -> None:
    """A template would write any word there, a misspelled one too."""
    found = tokenizer()
    jinja = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    talk = Conversation(PromptSpec(), jinja)
    assert talk.encode(found, [{"role": "user", "content": "a"}])
    with pytest.raises(TemplateError, match="message 1 has the role"):
        talk.encode(found, [{"role": r, "content": "a"} for r in ("user", "asistant")])
    with pytest.raises(TemplateError, match="message 0 has the role 'x'"):
        talk.text(found, [{"role": "x", "content": "a"}])
    named = Conversation(PromptSpec(), jinja + "{% if 'critic' in messages %}{% endif %}")
    assert named.encode(found, [{"role": "critic", "content": "a"}])


def test_an_empty_system_message_is_one() -> None:
    found = tokenizer()
    jinja = "{% for m in messages %}[{{ m.role }}]{% endfor %}{{ messages[-1].content }}"
    user = [{"role": "user", "content": "a"}]
    without, empty = (Conversation(PromptSpec(system=s), jinja) for s in (None, ""))
    assert without.text(found, user) == "[user]a"
    assert empty.text(found, user) == "[system][user]a"


def test_a_prompt_template_has_the_same_switch() -> None:
    found = tokenizer()
    end, id = list(found.special.control.items())[-1]
    template = PromptTemplate.parse("{query}")
    message = [{"role": "user", "content": f"a{end}"}]
    assert id not in template.encode_chat(found, message)
    assert id in template.encode_chat(found, message, special=True)
