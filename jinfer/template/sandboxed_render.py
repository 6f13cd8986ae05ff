"""Sandboxed rendering: a child process bounded by the operating system, for costly templates.

Has both ends: `compile_in_sandbox` and `render_in_sandbox` send questions, which `answer` answers
in the child.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError
from jinfer.template.render import compile_source, render
from jinfer.template.template_errors import TemplateError
from jinfer.template.template_limits import MAX_SIZE

_MEMORY = 448 << 20  # bytes of address space, including 40 MB of the interpreter
_COMPILE_SECONDS = 4.0
_CHARACTERS_PER_SECOND = 50_000  # or more

_compiled = lru_cache(maxsize=8)(compile_source)
_child = SandboxedProcess(__name__, memory=_MEMORY, answer_bytes=12 * MAX_SIZE)


def compile_in_sandbox(source: str) -> None:
    """Checks that a template compiles. Raises `TemplateError`."""
    _ask({"source": source}, _COMPILE_SECONDS, "to be compiled")


def render_in_sandbox(source: str, names: Mapping[str, Any], seconds: float) -> str:
    """As `render.render`. Values are restricted to JSON's types. Raises `TemplateError`."""
    question = {"source": source, "names": names, "seconds": seconds}
    # A new process has to compile the template first.
    compiling = min(_COMPILE_SECONDS, len(source) / _CHARACTERS_PER_SECOND)
    return str(_ask(question, seconds + compiling, "to be rendered"))


def _ask(question: Mapping[str, Any], seconds: float, what: str) -> Any:
    try:
        plain = _plain(question)
    except RecursionError:
        raise TemplateError("chat template: the messages are nested too deeply") from None
    try:
        said = _child.ask(plain, seconds)
    except SandboxError as error:
        raise TemplateError(f"chat template: {error}, {what}") from None
    if "refused" in said:
        raise TemplateError(said["refused"])
    return said["text"]


def _plain(value: Any) -> Any:
    """A value with JSON's types alone."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    raise TemplateError(
        f"chat template: it runs in a process of its own, which cannot be given a "
        f"{type(value).__name__}"
    )


def answer(question: Mapping[str, Any]) -> dict[str, str]:
    """Answers a question, in the child process."""
    try:
        template = _compiled(question["source"])
        if "names" not in question:
            return {"text": ""}
        return {"text": render(template, question["names"], question["seconds"], confined=True)}
    except TemplateError as error:
        return {"refused": str(error)}
