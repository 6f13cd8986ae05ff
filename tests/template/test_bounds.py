"""Templates that loop or grow without end stop soon, and in little memory."""

from __future__ import annotations

import subprocess
import sys
import time

import jinja2
import pytest

from jinfer.template import ChatTemplate, TemplateError, compiled_template, template_limits
from jinfer.template.render import compile_source

from .test_chat_template import EXPECTED

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
    grow("1", "{'a': ns.s, 'b': ns.s}", "{{ ns.s == {} }}"),
    grow("1", "dict(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    grow("1", "{}.fromkeys('ab', ns.s)", "{{ ns.s }}"),
    grow("1", "namespace(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    grow("3", "ns.s * ns.s"),
    "{% set ns = namespace() %}{% set ns.a = [ns, ns] %}{{ ns }}",
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


@pytest.mark.parametrize("source", TIME + SIZE)
def test_ends_soon(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([])
    assert time.thread_time() - start < 2  # one step beyond the limit may be long


@pytest.mark.parametrize(
    "source",
    [
        # One of each filter or method; each takes as long as it may before it is stopped.
        pytest.param(step, marks=[pytest.mark.soak] if number in (1, 2, 5) else [])
        for number, step in enumerate(STEPS)
    ],
)
def test_a_step_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    # A fast processor gets as far as the bound on memory within this time.
    with pytest.raises(TemplateError, match=r"takes too long|too much memory"):
        ChatTemplate(source).render([])
    assert time.monotonic() - start < 30  # of it, 3 are the other process's own
    assert ChatTemplate("{{ 7.25|round(1) }}").render([]) == "7.2"  # the next one is served


def test_a_long_template_is_compiled_where_it_can_be_stopped() -> None:
    start, own = time.monotonic(), time.thread_time()
    with pytest.raises(TemplateError, match="compile"):
        ChatTemplate("{% macro a() %}{% endmacro %}" * 20_000)
    assert time.thread_time() - own < 0.5
    assert time.monotonic() - start < 60
    long = "{# " + "x" * 100_000 + " #}{{ messages[0].content }}"
    assert ChatTemplate(long).render([{"role": "user", "content": "é"}]) == "é"


def test_a_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(source: str) -> jinja2.Template:
        compiled.append(source)
        return compile_source(source)

    monkeypatch.setattr(compiled_template, "compile_source", count)
    for number in range(5):
        source = "{{ messages|length }} of one source"
        assert ChatTemplate(source).render([{}] * number) == f"{number} of one source"
    assert len(compiled) == 1


def test_what_runs_in_its_own_process_is_the_same_and_says_what_it_cannot_be_given() -> None:
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


def test_known_templates_need_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> str:
        raise AssertionError("rendered in a process of its own")

    monkeypatch.setattr(compiled_template, "render_in_sandbox", refuse)
    for case in EXPECTED["cases"]:
        template = ChatTemplate(
            EXPECTED["templates"][case["template"]], variables=EXPECTED["variables"]
        )
        if case["error"] is None:
            template.render(
                EXPECTED["conversations"][case["conversation"]],
                tools=EXPECTED["tools"] if case["tools"] else None,
                add_generation_prompt=case["add_generation_prompt"],
            )


def test_the_limit_is_a_second() -> None:
    start = time.thread_time()
    with pytest.raises(TemplateError, match="the template ran for more than 1 s"):
        ChatTemplate(TIME[0]).render([])
    assert 1 <= time.thread_time() - start < 2


def test_memory_is_bounded() -> None:
    """All of them in a process that may not have more than 1.5 GiB beyond its imports."""
    program = (
        "import resource, sys\n"
        "from jinfer.template import ChatTemplate, TemplateError\n"
        "from tests.template.test_bounds import SIZE\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limit = used + 1536 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "for source in SIZE:\n"
        "    try:\n"
        "        ChatTemplate(source).render([])\n"
        "    except TemplateError as error:\n"
        "        assert 'memory' not in str(error).lower() or '/ 0' in source, source\n"
        "    else:\n"
        "        raise AssertionError(source)\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("the size of a process is read from /proc")
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ '<' ~ m.role ~ '>' + m.content|trim + '</s>' }}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": "user", "content": "word " * 500}] * 4000
    text = ChatTemplate(source).render(messages)
    assert text == ("<user>" + ("word " * 500).strip() + "</s>") * 4000 + "4000"
