"""Templates that loop or grow without end are stopped soon, and in little memory."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from jinfer.template import ChatTemplate, TemplateError, chat_template

_GROW = "{{% set ns = namespace(s={start}) %}}{{% for i in range(200) %}}{step}{{% endfor %}}{end}"


def grow(start: str, step: str, end: str = "") -> str:
    return _GROW.format(start=start, step="{% set ns.s = " + step + " %}", end=end)


TIME = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999)|select|list %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set b = f(n-1) %}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    grow("[1]", "[ns.s]", "{{ ns.s }}").replace("200", "99999"),
)
SIZE = (
    grow("'x'", "ns.s + ns.s"),
    grow("'x'", "ns.s ~ ns.s"),
    grow("'x'", "ns.s * 2"),
    grow("'x'", "'%s%s' % (ns.s, ns.s)"),
    grow("'x'", "'{}{}'.format(ns.s, ns.s)"),
    grow("'x'", "ns.s.replace('x', 'xx')"),
    grow("'x'", "ns.s|replace('x', 'xx')"),
    grow("'x'", "[ns.s, ns.s]|join"),
    grow("'x'", "''.join([ns.s, ns.s])"),
    grow("'x'", "f(ns.s)").replace("{% for", "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% for"),
    grow("[1]", "ns.s + ns.s"),
    grow("[1]", "ns.s * 2"),
    grow("[1]", "[ns.s, ns.s]", "{{ ns.s }}"),
    grow("[1]", "(ns.s, ns.s)", "{{ ns.s|tojson }}"),
    grow("1", "{'a': ns.s, 'b': ns.s}", "{{ ns.s }}"),
    grow("1", "dict(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    grow("1", "{}.fromkeys('ab', ns.s)", "{{ ns.s }}"),
    grow("1", "namespace(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    grow("3", "ns.s * ns.s"),
    "{% for i in range(99999) %}{% for j in range(99) %}literal text{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * [1] }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ ('\\t' * 1000000).expandtabs(1000) }}",
    "{{ 'abc'.translate({97: 'x' * 9999999, 98: 'y' * 9999999}) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "{{ ('a' * 1000000)|join('b' * 1000000) }}",
    "{{ range(99999)|map('string')|map('list')|map('join', 'x' * 10000)|join }}",
    "{{ range(99999)|map('string')|map('center', 10000)|list|length }}{{ 1 / 0 }}",
    "{{ {}.fromkeys(range(99999)|map('string')|map('center', 10000)) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ ('x\n' * 100000)|indent(1000000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "{{ [1]|tojson(indent=1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ 'a'.encode().ljust(1000000000) }}",
    "{{ '%(a)4000000000d' % {'a': 1} }}",
    "{{ '%((a)b)4000000000d' % {'(a)b': 1} }}",
    "{{ '%%%(a)#-4000000000d'|format(a=1) }}",
    "{{ '%.4000000000f' % 1 }}",
    "{{ 1|round(-10**9) }}",
    "{{ 1|round(10**9, 'ceil') }}",
    "{{ ('f' * 1000000)|int(base=16) }}",
    "{% set big = 'a' * 9999999 %}"
    + "".join(f"{{% set a{i} = big[1:] %}}" for i in range(1500))  # each is kept
    + "{{ 1 / 0 }}",
)
STEPS = (  # one step of the interpreter, for ever
    "{{ ('a' * 8000000).strip('b' * 7999999 ~ 'a') }}",
    "{{ ('a' * 8000000)|trim('b' * 7999999 ~ 'a') }}",
    "{{ ('ab' * 4000000).rstrip(('c' * 7999999) ~ 'ab') }}",
    "{{ ('a' * 8000000)|sort }}",  # a letter after the other
    "{{ ('a' * 8000000)|groupby('x') }}",
    "{{ range(99999)|groupby('ab' * 4000000) }}",
    "{% for x in ('a' * 8000000)|map(attribute='x') %}{{ loop|length }}{% endfor %}",
)


def peak(process: int) -> int:
    """Bytes of memory that a process had at most."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("source", TIME + SIZE + STEPS)
def test_hostile_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, and without memory of this process; the next template is served."""
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.2)
    own, begun = time.process_time(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([])
    assert time.process_time() - own < 1
    assert time.monotonic() - begun < 30
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of processes that have ended
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert ChatTemplate("{{ 7.25|round(1) }}").render([]) == "7.2"


def test_time_limit_is_a_second() -> None:
    assert ChatTemplate("{{ 1 }}").render([]) == "1"  # the process has started
    begun = time.monotonic()
    with pytest.raises(TemplateError, match="rendering takes too long"):
        ChatTemplate(TIME[0]).render([])
    assert time.monotonic() - begun >= 1


def test_memory_limit() -> None:
    with pytest.raises(TemplateError, match="rendering needs too much memory"):
        ChatTemplate("{{ 'x' * 10000000000 }}").render([])
    largest = "{{ ('x' * 100000000)|length }}"
    assert ChatTemplate(largest).render([]) == "100000000"
    process = chat_template._child._process
    assert process is not None
    assert peak(process.pid) < 200 << 20


def test_long_template_is_compiled_within_limits() -> None:
    begun, own = time.monotonic(), time.process_time()
    with pytest.raises(TemplateError, match="compiling"):
        ChatTemplate("{% macro a() %}{% endmacro %}" * 20_000)
    assert time.process_time() - own < 0.5
    assert time.monotonic() - begun < 60
    long = "{# " + "x" * 100_000 + " #}{{ messages[0].content }}"
    assert ChatTemplate(long).render([{"role": "user", "content": "é"}]) == "é"


def test_values_have_types_of_json() -> None:
    source = "{{ 2.7|round }} {{ '%s-%03d' % (v, 7) }} {{ messages[0].content|wordcount }}"
    messages = ({"role": "user", "content": "one two \ud800"},)
    assert ChatTemplate(source).render(messages, v=["z"]) == "3.0 ['z']-007 2"
    with pytest.raises(TemplateError, match="cannot be given a object"):
        ChatTemplate(source).render(messages, v=object())
    with pytest.raises(TemplateError, match="'nothing' is undefined"):
        ChatTemplate("{{ 2.5|round }}{{ nothing.at_all }}").render(messages)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate(source).render(messages, v=deep)


def test_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ '<' ~ m.role ~ '>' + m.content|trim + '</s>' }}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": "user", "content": "word " * 500}] * 4000
    text = ChatTemplate(source).render(messages)
    assert text == ("<user>" + ("word " * 500).strip() + "</s>") * 4000 + "4000"
