"""Tool-call and reasoning formats: one table, and which format a chat template uses.

A format is a `ToolCallFormat` with a test, a row here, and its name in
`jinfer.modelspec.model_spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Literal

from jinfer.server.tool_parsers import harmony, json_formats, tag_formats
from jinfer.server.tool_parsers.call_format import LarkGrammar, ToolCallFormat
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.output_deltas import DeltaCollector
from jinfer.template.thinking_marks import THINKING_MARKS, ThinkingMarks, thinking_marks
from jinfer.tokenizer import Tokenizer

# Where the prompt leaves the model: inside reasoning, after it, or free to begin it.
ReasoningState = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class ReasoningFormat(ThinkingMarks):
    """The reasoning syntax of models."""

    def state(self, prompt: str) -> ReasoningState:
        """Return the state after a prompt, or its last tokens."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.end) else "free"

    def parse(
        self, reader: IncrementalReader, out: DeltaCollector, state: ReasoningState
    ) -> Parse[None]:
        """Parse the reasoning at the beginning of an answer, if any."""
        if state == "closed":
            return
        reader.mark()
        yield from reader.space()
        if not (yield from reader.starts(self.begin)) and state != "open":
            out.content(reader.raw())
            return
        yield from reader.until((self.end,), out.reasoning)
        out.end_reasoning()

    def grammar(self, lark: LarkGrammar, state: ReasoningState) -> str:
        """Return the grammar rule of reasoning, where it is possible."""
        if state == "closed":
            return ""
        after = lark.rule("GAP", r"/[ \n]{0,4}/")
        thought = f"{lark.upto(self.end)} {after}"
        if state == "open":
            return thought
        whole = lark.rule("thought", f"{lark.text(self.begin)} {thought}")
        return f"{whole}?"


REASONING_FORMATS = tuple(ReasoningFormat(*astuple(marks)) for marks in THINKING_MARKS)


PHI_TOOLS = "<|tool|>"

# Each format with a test of a chat template that uses it. The first format whose test holds is
# chosen, so the more specific ones come first.
_TABLE: tuple[tuple[ToolCallFormat, Callable[[str], bool]], ...] = (
    (harmony.HARMONY, lambda text: harmony.CHANNEL in text),
    (tag_formats.DSML, lambda text: tag_formats.DSML_MARK in text),
    (json_formats.DEEPSEEK, lambda text: json_formats.DEEPSEEK_CALLS in text),
    (json_formats.MISTRAL, lambda text: json_formats.MISTRAL_CALLS in text),
    (
        json_formats.COMMAND,
        lambda text: (
            json_formats.ACTION in text
            or (json_formats.ACTION_WORD in text and "tool_name" in text)
        ),
    ),
    (json_formats.PHI, lambda text: PHI_TOOLS in text),
    (json_formats.GRANITE, lambda text: json_formats.TAG in text),
    (
        tag_formats.QWEN_CODER,
        lambda text: tag_formats.QWEN_FUNCTION in text and tag_formats.QWEN_PARAMETER in text,
    ),
    (json_formats.HERMES, lambda text: json_formats.HERMES_OPEN in text),
    (
        json_formats.LLAMA,
        lambda text: (
            json_formats.PYTHON_TAG in text or ('"name": ' in text and '"parameters": ' in text)
        ),
    ),
)
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {format.name: format for format, _ in _TABLE}


def tool_call_format(template: str, name: str = "auto") -> ToolCallFormat:
    """Return the tool-call format of a model; by default Hermes.

    Args:
        template: the source of the chat template.
        name: `prompt.tool_calls` of the specification.
    """
    if name != "auto":
        return TOOL_CALL_FORMATS[name]
    return next((format for format, matches in _TABLE if matches(template)), json_formats.HERMES)


def reasoning_format(
    template: str, tokenizer: Tokenizer, name: str = "auto"
) -> ReasoningFormat | None:
    """Return the reasoning format of a model; None without reasoning.

    Args:
        tokenizer: reasoning models have special tokens for the marks.
        name: `prompt.reasoning` of the specification.
    """
    marks = thinking_marks(template, tokenizer, name)
    # A format that parses its own thoughts is not in the table.
    return next(
        (format for format in REASONING_FORMATS if marks and format.name == marks.name), None
    )


def special_token_ids(marks: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of special tokens among marks, which the decoder must not skip."""
    parts = [part for mark in marks for part in tokenizer.split_special(mark)]
    ids = (part for part in parts if isinstance(part, int) and tokenizer.is_control(part))
    return tuple(dict.fromkeys(ids))
