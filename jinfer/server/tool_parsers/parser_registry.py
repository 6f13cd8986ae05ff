"""Tool-call and reasoning formats: one table, and which format a chat template uses.

A format is a module of its own with a test, a row here, and its name in
`jinfer.modelspec.prompt_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jinfer.server.tool_parsers import (
    deepseek,
    dsml,
    harmony,
    hermes,
    json_list,
    llama,
    mistral,
    qwen_coder,
)
from jinfer.server.tool_parsers.call_format import Format
from jinfer.server.tool_parsers.reasoning import THINKINGS, Thinking
from jinfer.tokenizer import Tokenizer

PHI_TOOLS = "<|tool|>"

# Each format with a test of a chat template that uses it. The first format whose test holds is
# chosen, so the more specific ones come first.
_TABLE: tuple[tuple[Format, Callable[[str], bool]], ...] = (
    (harmony.HARMONY, lambda text: harmony.CHANNEL in text),
    (dsml.DSML, lambda text: dsml.MARK in text),
    (deepseek.DEEPSEEK, lambda text: deepseek.CALLS in text),
    (mistral.MISTRAL, lambda text: mistral.CALLS in text),
    (
        json_list.COMMAND,
        lambda text: json_list.ACTION in text or (json_list.SAID in text and "tool_name" in text),
    ),
    (json_list.PHI, lambda text: PHI_TOOLS in text),
    (json_list.GRANITE, lambda text: json_list.TAG in text),
    (
        qwen_coder.QWEN_CODER,
        lambda text: qwen_coder.FUNCTION in text and qwen_coder.PARAMETER in text,
    ),
    (hermes.HERMES, lambda text: hermes.OPEN in text),
    (
        llama.LLAMA,
        lambda text: llama.TAG in text or ('"name": ' in text and '"parameters": ' in text),
    ),
)
FORMATS: Mapping[str, Format] = {format.name: format for format, _ in _TABLE}


def format_of(template: str, chosen: str = "auto") -> Format:
    """The tool-call format of a model; Hermes if the template does not tell.

    Args:
        template: the source of the chat template.
        chosen: `prompt.tool_calls` of the specification.
    """
    if chosen != "auto":
        return FORMATS[chosen]
    return next((format for format, matches in _TABLE if matches(template)), hermes.HERMES)


def thinking_of(template: str, tokenizer: Tokenizer, chosen: str = "auto") -> Thinking | None:
    """The reasoning format of a model; None without reasoning.

    Args:
        tokenizer: reasoning models have special tokens for the marks.
        chosen: `prompt.reasoning` of the specification.
    """
    if chosen != "auto":
        return next((one for one in THINKINGS if one.name == chosen), None)
    for one in THINKINGS:
        if one.end in template or tokenizer.id(one.end) is not None:
            return one
    return None


def shown(marks: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of special tokens among some marks, which the decoder must not skip."""
    parts = [part for mark in marks for part in tokenizer.split_special(mark)]
    ids = (part for part in parts if isinstance(part, int) and tokenizer.is_control(part))
    return tuple(dict.fromkeys(ids))
