"""Completions as HTML for notebooks: each token is the more shaded, the less likely it was."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from jinfer.html.html_page import fragment
from jinfer.html.token_spans import Likely, token_spans
from jinfer.html.token_text import flowing

_MAX_SHOWN = 20_000  # characters, or tokens, of an answer
_HINT = "point at a token, or go to it with Tab and arrows, to see the likeliest alternatives"


class Completion(Protocol):
    """The part of a `generation.Completion` that is shown; its package imports this one."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def logprobs(self) -> Sequence[Likely] | None: ...


def completions_html(answers: Sequence[Completion]) -> str:
    """Show each answer in a box, with its number of tokens and its finish reason."""
    hint = f'<output data-hint="{_HINT}"></output>' if any(a.logprobs for a in answers) else ""
    return fragment("".join([*map(_completion, answers), hint]))


def _completion(answer: Completion) -> str:
    shown, hint = completion_text(answer)
    count = len(answer.token_ids)
    caption = f"{count} token{'s' * (count != 1)}, {answer.finish_reason}; {hint}"
    return f'<div class="text" data-keys="0">{shown}</div><p>{escape(caption)}</p>'


def completion_text(answer: Completion) -> tuple[str, str]:
    """An answer's text as HTML, and a note on how it is shown."""
    if answer.logprobs:
        return token_spans(answer.logprobs[:_MAX_SHOWN]), "the more shaded, the less likely"
    if answer.text or not answer.token_ids:
        return escape(flowing(answer.text[:_MAX_SHOWN], "\n")), "logprobs=5 shades its tokens"
    return escape(str(answer.token_ids[:_MAX_SHOWN])[1:-1]), "token ids: no tokenizer"
