"""Reasoning parser: reasoning (thinking) between two marks, before the answer."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector
from jinfer.template.thinking_marks import THINKING_MARKS, ThinkingMarks

# Where the prompt leaves the model: inside reasoning, after it, or free to begin it.
ReasoningState = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class ReasoningFormat(ThinkingMarks):
    """The reasoning syntax of a family of models."""

    def state(self, prompt: str) -> ReasoningState:
        """The state after a prompt, or its last tokens."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.end) else "free"

    def parse(
        self, reader: IncrementalReader, out: DeltaCollector, state: ReasoningState
    ) -> Parse[None]:
        """Parses the reasoning at the beginning of an answer, if any."""
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
        """The grammar rule of reasoning, where it may come."""
        if state == "closed":
            return ""
        after = lark.rule("GAP", r"/[ \n]{0,4}/")
        thought = f"{lark.upto(self.end)} {after}"
        if state == "open":
            return thought
        whole = lark.rule("thought", f"{lark.text(self.begin)} {thought}")
        return f"{whole}?"


REASONING_FORMATS = tuple(ReasoningFormat(*astuple(marks)) for marks in THINKING_MARKS)
