"""Child process of `chat_template`: compiles and renders Jinja templates in Jinja's own sandbox.

The sandbox keeps Python's internals and the input from the template. The process is what bounds
time and memory (`SandboxedProcess`): single steps of a template can take either without end.
(minijinja has a budget of its own, but prints 28 of the 186 reference renderings differently.)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jinfer.template.template_errors import MAX_CHARACTERS, TemplateError


def answer(question: Mapping[str, Any]) -> dict[str, str]:
    """Compile a template, and render it if the question has variables."""
    try:
        template = _compiled(question["source"])
        names = question.get("names")
        return {"text": "" if names is None else _rendered(template, names)}
    except TemplateError as error:
        return {"refused": str(error)}


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    try:
        with warnings.catch_warnings(action="ignore"):  # SyntaxWarnings, as about 1[2]
            return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}"[:300]) from None
    except (RecursionError, SyntaxError, ValueError) as error:
        raise TemplateError(f"chat template: cannot be compiled: {error}"[:300]) from None


def _rendered(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    try:
        text = template.render(names)
    except MemoryError:  # the process ends, and with it what it has allocated
        raise
    except Exception as error:  # an untrusted program may raise anything
        # Its message is untrusted too, so it becomes one line.
        words = " ".join(_message(error).split()).encode("utf-8", "replace").decode()
        raise TemplateError(f"chat template: {words}"[:500]) from None
    if len(text) > MAX_CHARACTERS:
        raise TemplateError(f"chat template: it wrote more than {MAX_CHARACTERS} characters")
    return text


def _message(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return str(error.message or type(error).__name__)
    if isinstance(error, RecursionError):
        return "a macro or loop calls itself too often"
    return f"{type(error).__name__}: {error}"


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistant tokens for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_as_is,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@pass_context
def _as_is(context: Context, value: Any) -> Any:
    """Keep Jinja from computing constants at compile time, which has another time limit."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, non-ASCII characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
