"""Chat templates against transformers' renderings, and where templates are found."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jinfer.template import ChatTemplate, TemplateError, find_chat_template

GOLDENS = Path(__file__).parents[1] / "goldens"
EXPECTED: dict[str, Any] = json.loads((GOLDENS / "tok_chat/expected.json").read_text("utf-8"))
USER = [{"role": "user", "content": "Hi <b>"}]


def render(source: str, **extra: Any) -> str:
    return ChatTemplate(source).render(USER, **extra)


@pytest.mark.parametrize("name", sorted(EXPECTED["templates"]))
def test_renderings(name: str) -> None:
    template = ChatTemplate(EXPECTED["templates"][name], variables=EXPECTED["variables"])
    cases = [case for case in EXPECTED["cases"] if case["template"] == name]
    assert cases
    for case in cases:
        keys: dict[str, Any] = {
            "messages": EXPECTED["conversations"][case["conversation"]],
            "tools": EXPECTED["tools"] if case["tools"] else None,
            "add_generation_prompt": case["add_generation_prompt"],
        }
        if case["error"] is None:
            assert template.render(**keys) == case["expected"]
        else:
            with pytest.raises(TemplateError) as error:
                template.render(**keys)
            reason = case["error"].split("(", 1)[1].strip("\"')")
            assert reason in str(error.value)


def test_to_json() -> None:
    value = {"b": ["é<", None], "a": 1.5}
    assert render("{{ v|tojson }}", v=value) == '{"b": ["é<", null], "a": 1.5}'
    assert render("{{ v|tojson(indent=2) }}", v=value) == json.dumps(
        value, indent=2, ensure_ascii=False
    )
    assert render("{{ v|tojson(ensure_ascii=true, sort_keys=true) }}", v=value) == json.dumps(
        value, sort_keys=True
    )
    assert render("{{ v|tojson(separators=(',', ':')) }}", v=[1, {"a": 2}]) == '[1,{"a":2}]'


def test_generation_block_is_transparent() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}"
    )
    assert render(source + "{{ x }}{% endfor %}") == "Hi <b>1"


def test_loop_controls_and_blocks_without_their_line_ends() -> None:
    source = (
        "{% for i in range(9) %}\n  {% if i == 2 %}\n{% break %}\n{% endif %}\n"
        "{{ i }}\n{% endfor %}\n"
    )
    assert render(source) == "0\n1\n"


def test_language_features() -> None:
    source = (
        "{% macro f(a, b='y') %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}"
        "{{ f('x') }} {% call f('p', b='q') %}c{% endcall %} {{ 'a' ~ 1 ~ none }} "
        "{% for a, b in [('k', 1), ('l', 2)] if b > 1 %}{{ loop.index }}{{ a }}{% endfor %} "
        "{% for x in [1, [2, [3]]] recursive %}"
        "{{ loop(x) if x is iterable else x }}{% endfor %} "
        "{% set t %}{{ 2 ** 3 % 5 }}{% endset %}{{ t }} {{ '%s-%03d' % ('z', 7) }} "
        "{{ '{:>4}'.format('w') }} {{ ['b', 'a']|sort|join(', ') }} {{ 'a-b'.replace('-', '+') }} "
        "{{ 'q'.join(['1', '2']) }} {{ messages|map(attribute='role')|list }} "
        "{{ 'x\ny'|indent(2) }} {{ {'a': 1}.items()|list }} {{ [1, 2, 3][::-1] + [0] }}"
    )
    assert render(source) == (
        "xy pqc a1None 1l 123 3 z-007    w a, b a+b 1q2 ['user'] x\n  y [('a', 1)] [3, 2, 1, 0]"
    )


def test_variables_and_extra() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ n }}{{ tools is none }}", variables={"bos_token": "<s>"}
    )
    assert template.render(USER, n=3) == "<s>3True"
    assert template.render(USER, bos_token="B", tools=[{}]) == "BFalse"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year + n) for n in (-1, 0)}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", "chat template, line 2: Expected an expression"),
        ("{% nothing %}", "line 1: Encountered unknown tag 'nothing'"),
        ("{{ x|nothing }}", "No filter named 'nothing'"),
        ("(" * 5 + "{{" + "(" * 5000 + "}}", "chat template"),
        ("x" * 1_000_001, "longer than 1000000 characters"),
    ],
)
def test_syntax_errors(source: str, words: str) -> None:
    with pytest.raises(TemplateError) as error:
        ChatTemplate(source)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('not so') }}", "chat template: not so"),
        ("{{ raise_exception('not\\n so \ud800') }}", "chat template: not so ?"),
        ("{{ x.y }}", "'x' is undefined"),
        ("{{ messages[0] + 1 }}", "TypeError"),
        ("{% include 'x' %}", "chat template: "),
        ("{% import 'x' as y %}", "chat template: "),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_failures(source: str, words: str) -> None:
    with pytest.raises(TemplateError) as error:
        render(source)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_python_warnings_of_a_template_are_silent() -> None:
    """Warnings are errors here: compiled as Python, this one is warned of."""
    with pytest.raises(TemplateError, match="TypeError: 'int' object is not subscr"):
        render("{{ 1[2:] }}")


def test_threads_do_not_share_limits() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ i }}{% endfor %}")
    reference = "".join(map(str, range(2000)))
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(template.render(USER))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [reference] * 8


def test_finds_templates_in_a_folder(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    assert find_chat_template(tmp_path) == "one"
    entries = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": entries}))
    assert find_chat_template(tmp_path) == "two"
    assert find_chat_template(tmp_path, "tool_use") == "three"
    assert find_chat_template(tmp_path, "rag") is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "four"}')
    assert find_chat_template(tmp_path) == "four"
    (tmp_path / "chat_template.jinja").write_text("five")
    assert find_chat_template(tmp_path) == "five"


def test_finds_templates_in_gguf_metadata() -> None:
    assert find_chat_template({}) is None
    keys = {"tokenizer.chat_template": "one", "tokenizer.chat_template.rag": "two"}
    assert find_chat_template(keys) == "one"
    assert find_chat_template(keys, "rag") == "two"


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [{}]}'])
def test_broken_configuration_names_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(text)
    with pytest.raises(TemplateError) as error:
        find_chat_template(tmp_path)
    assert str(error.value).startswith(f"{path}: ")
