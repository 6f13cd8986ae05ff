"""Tool-call and reasoning formats: one table, and which format a chat template uses.

A format is a module of its own with a test, a row here, and its name in
`jinfer.modelspec.model_spec`.
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
from jinfer.server.tool_parsers.call_format import ToolCallFormat
from jinfer.server.tool_parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from jinfer.template.thinking_marks import thinking_marks
from jinfer.tokenizer import Tokenizer

PHI_TOOLS = "<|tool|>"

# Each format with a test of a chat template that uses it. The first format whose test holds is
# chosen, so the more specific ones come first.
_TABLE: tuple[tuple[ToolCallFormat, Callable[[str], bool]], ...] = (
    (harmony.HARMONY, lambda text: harmony.CHANNEL in text),
    (dsml.DSML, lambda text: dsml.MARK in text),
    (deepseek.DEEPSEEK, lambda text: deepseek.CALLS in text),
    (mistral.MISTRAL, lambda text: mistral.CALLS in text),
    (
        json_list.COMMAND,
        lambda text: (
            json_list.ACTION in text or (json_list.ACTION_WORD in text and "tool_name" in text)
        ),
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
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {format.name: format for format, _ in _TABLE}


def tool_call_format(template: str, chosen: str = "auto") -> ToolCallFormat:
    """The tool-call format of a model; Hermes if the template does not tell.

    Args:
        template: the source of the chat template.
        chosen: `prompt.tool_calls` of the specification.
    """
    if chosen != "auto":
        return TOOL_CALL_FORMATS[chosen]
    return next((format for format, matches in _TABLE if matches(template)), hermes.HERMES)


def reasoning_format(
    template: str, tokenizer: Tokenizer, chosen: str = "auto"
) -> ReasoningFormat | None:
    """The reasoning format of a model; None without reasoning.

    Args:
        tokenizer: reasoning models have special tokens for the marks.
        chosen: `prompt.reasoning` of the specification.
    """
    marks = thinking_marks(template, tokenizer, chosen)
    # A format that reads its own thoughts has none here.
    return next((one for one in REASONING_FORMATS if marks and one.name == marks.name), None)


def special_token_ids(marks: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of special tokens among some marks, which the decoder must not skip."""
    parts = [part for mark in marks for part in tokenizer.split_special(mark)]
    ids = (part for part in parts if isinstance(part, int) and tokenizer.is_control(part))
    return tuple(dict.fromkeys(ids))
