"""Template compilation and rendering, used in this process and in the sandbox process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2

from jinfer.template.jinja_sandbox import BoundedEnvironment
from jinfer.template.template_errors import TemplateError
from jinfer.template.template_limits import limited

_MAX_DATE = 1000  # characters of a date format


def compile_source(source: str) -> jinja2.Template:
    """Compiles a template.

    Raises:
        TemplateError: a syntax error, with its line.
    """
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}"[:300]) from None
    except MemoryError:
        raise TemplateError("chat template: too much memory is needed to compile it") from None
    except (RecursionError, SyntaxError, ValueError) as error:
        raise TemplateError(f"chat template: cannot be compiled: {error}"[:300]) from None


def render(
    template: jinja2.Template, names: Mapping[str, Any], seconds: float, *, confined: bool
) -> str:
    """Renders a template with its variables.

    Raises:
        TemplateError: it rejects them, fails, or exceeds the limits.
        NeedsSandbox: it must be rendered in the sandbox process.
    """
    try:
        with limited(seconds, confined=confined):
            return template.render(names)
    except TemplateError:
        raise
    except MemoryError:
        raise TemplateError("chat template: needs too much memory") from None
    except Exception as error:  # an untrusted program may raise anything
        # Its message is untrusted too, so it is sanitized to one line.
        words = " ".join(_message(error).split()).encode("utf-8", "replace").decode()
        raise TemplateError(f"chat template: {words}"[:500]) from None


def _message(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return str(error.message or type(error).__name__)
    if isinstance(error, RecursionError):
        return "a macro or loop calls itself too often"
    return f"{type(error).__name__}: {error}"


@cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:_MAX_DATE])
