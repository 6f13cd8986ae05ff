"""Random templates out of what templates are made of: a text, or a `TemplateError`, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.template import ChatTemplate, TemplateError, chat_template, render_child

from ..hostile import EXAMPLES, endures, many
from .test_chat_template import EXPECTED

MESSAGES = [
    {"role": "user", "content": "Hi %(a)4000000000d {0:9999999} \ud800 <|im_end|>"},
    {"role": "assistant", "content": "x" * 2000},
]
FILTERS = st.sampled_from(sorted(render_child._environment().filters))
METHODS = st.sampled_from(
    sorted({name for kind in (str, list, dict, int, tuple) for name in dir(kind)})
)
ATOMS = st.sampled_from(
    ["messages", "messages[0].content", "messages[-1]", "x", "none", "true", "0", "-1", "7", "1.5",
     "10 ** 9", "-10 ** 9", "2 ** 4000", "'a'", "'%(a)4000000000d'", "'%s'", "'{:99999999}'", "''",
     "'a' * 8000000", "'ab' * 4000000", "'b' * 7999999 ~ 'a'", "range(99999)", "[1]", "[[1]] * 9",
     "{'a': 1}", "{'a': [1]}", "loop", "ns", "namespace(a=1)", "cycler('a', 'b')", "joiner(',')",
     "dict(a=1)", "range(3)|map('string')", "messages|map(attribute='content')", "f", "f(1)",
     "strftime_now('%Y')", "'é' * 99999", "'\\n' * 99999", "messages[0].content[::-1]"]
)  # fmt: skip
BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "in", "or"])
TESTS = st.sampled_from(sorted(render_child._environment().tests))


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions made of smaller ones."""
    few = st.lists(inner, max_size=2).map(", ".join)
    return st.one_of(
        st.tuples(inner, BINARY, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, FILTERS, few).map(lambda t: f"({t[0]})|{t[1]}({t[2]})"),
        st.tuples(inner, METHODS, few).map(lambda t: f"({t[0]}).{t[1]}({t[2]})"),
        st.tuples(inner, METHODS).map(lambda t: f"({t[0]})['{t[1]}']"),
        st.tuples(inner, TESTS, few).map(lambda t: f"({t[0]} is {t[1]}({t[2]}))"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}:]"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}]"),
        st.tuples(inner, FILTERS).map(lambda t: f"({t[0]})|map('{t[1]}')|list"),
        st.tuples(inner, TESTS, inner).map(lambda t: f"({t[0]})|select('{t[1]}', {t[2]})|list"),
    )


EXPRESSIONS = st.recursive(ATOMS, larger, max_leaves=5)


def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements around others."""
    e = EXPRESSIONS
    return st.one_of(
        st.tuples(e, inner).map(lambda t: f"{{% for x in {t[0]} %}}{t[1]}{{% endfor %}}"),
        st.tuples(e, inner).map(lambda t: f"{{% if {t[0]} %}}{t[1]}{{% endif %}}"),
        st.tuples(e, inner).map(lambda t: f"{{% set ns.a = {t[0]} %}}{t[1]}"),
        st.tuples(FILTERS, inner).map(lambda t: f"{{% filter {t[0]} %}}{t[1]}{{% endfilter %}}"),
        inner.map(lambda i: f"{{% macro f(x) %}}{i}{{% endmacro %}}{{{{ f(1) }}}}"),
        inner.map(lambda i: f"{{% set x %}}{i}{{% endset %}}{{{{ x }}}}"),
        st.tuples(inner, inner).map("".join),
    )


OUTPUTS = EXPRESSIONS.map(lambda e: f"{{{{ {e} }}}}") | st.sampled_from(["text", "{{ x }}", "{{"])
TEMPLATES = st.recursive(OUTPUTS, longer, max_leaves=4)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_random_templates(tmp_path: Path, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.05)
    file = tmp_path / "template"

    @many(examples)
    @given(TEMPLATES)
    def run(source: str) -> None:
        source = "{% set ns = namespace(a=1) %}" + source
        file.write_text(source)
        endures(lambda: ChatTemplate(source).render(MESSAGES), (TemplateError,), file)

    run()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_known_templates(
    tmp_path: Path, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.05)
    file = tmp_path / "template"
    sources = st.sampled_from(sorted(EXPECTED["templates"].values()))
    pieces = EXPRESSIONS | st.sampled_from(["{%", "%}", "{{", "}}", "endfor", "'", "-", "(", "|"])

    @many(examples)
    @given(sources, st.data())
    def run(source: str, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            begin = data.draw(st.integers(0, len(source)))
            end = data.draw(st.integers(begin, min(len(source), begin + 12)))
            source = source[:begin] + data.draw(pieces) + source[end:]
        file.write_text(source)
        endures(lambda: ChatTemplate(source).render(MESSAGES), (TemplateError,), file)

    run()
