"""Thinking marks (reasoning tags): the marks around a model's thoughts, by its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinfer.tokenizer import Tokenizer

_TAIL_TOKENS = 16  # tokens at a prompt's end that show whether it opens a thought
_SWITCHES = ("enable_thinking", "thinking")
_CODE = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks around the thoughts of a family of models.

    Attributes:
        name: the value of `prompt.reasoning` in a specification.
        begin, end: the marks.
        between: text from a thought to the next; "": an answer has at most one thought, at its
            beginning.
        answer: text from a thought to the answer.
    """

    name: str
    begin: str
    end: str
    between: str = ""
    answer: str = ""


THINKING_MARKS = (
    ThinkingMarks("think", "<think>", "</think>"),
    ThinkingMarks("mistral", "[THINK]", "[/THINK]"),
    ThinkingMarks("command", "<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingMarks("seed", "<seed:think>", "</seed:think>"),
)
# gpt-oss: thoughts and answers are messages in channels; several thoughts may follow one another.
HARMONY_MARKS = ThinkingMarks(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
)


def thinking_marks(
    template: str, tokenizer: Tokenizer, chosen: str = "auto"
) -> ThinkingMarks | None:
    """The marks of a model's thoughts; None if it has none.

    Args:
        template: the source of the chat template.
        tokenizer: models that think have special tokens for the marks.
        chosen: `prompt.reasoning` of the specification.
    """
    if chosen != "auto":
        return next((marks for marks in THINKING_MARKS if marks.name == chosen), None)
    if "<|channel|>" in template:
        return HARMONY_MARKS
    for marks in THINKING_MARKS:
        if marks.end in template or tokenizer.id(marks.end) is not None:
            return marks
    return None


def opens_thought(marks: ThinkingMarks, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the answer to a prompt begins inside a thought."""
    begin, end = tokenizer.id(marks.begin), tokenizer.id(marks.end)
    if begin is not None and end is not None:
        # Messages cannot contain special tokens, so the last of them is the template's.
        last = next((id for id in reversed(prompt) if id in (begin, end)), None)
        return last == begin
    tail = tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special=False)
    return tail.rstrip().endswith(marks.begin)


def thinking_switches(template: str) -> list[str]:
    """The variables by which a chat template turns thinking on or off.

    The word is also that of a message's field and of texts, which are no variables.
    """
    code = " ".join(_CODE.findall(template))
    return [name for name in _SWITCHES if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code)]
