"""Notebook view of completions: HTML text whose tokens are shaded by how unlikely they were."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.html.html_page import fragment
from jinfer.html.token_spans import token_spans
from jinfer.html.token_text import flowing

_MOST = 20_000  # characters, or tokens, shown of an answer
_HINT = "the likeliest at a token: point at it, or go to it with Tab and arrows"


class Completion(Protocol):
    """What is shown of a `generation.Completion`, which imports this module."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None: ...


def completions_html(answers: Sequence[Completion]) -> str:
    """Each answer in a box, with its number of tokens and its finish reason."""
    said = f'<output data-hint="{_HINT}"></output>' if any(a.logprobs for a in answers) else ""
    return fragment("".join([*map(_completion, answers), said]))


def _completion(answer: Completion) -> str:
    shown, hint = completion_text(answer)
    count = len(answer.token_ids)
    caption = f"{count} token{'s' * (count != 1)}, {answer.finish_reason}; {hint}"
    return f'<div class="text" data-keys="0">{shown}</div><p>{escape(caption)}</p>'


def completion_text(answer: Completion) -> tuple[str, str]:
    """An answer's text as HTML, and what to know of how it is shown."""
    if answer.logprobs:
        return token_spans(answer.logprobs[:_MOST]), "the more shaded, the less likely"
    if answer.text or not answer.token_ids:
        return escape(flowing(answer.text[:_MOST], "\n")), "logprobs=5 shades its tokens"
    return escape(str(answer.token_ids[:_MOST])[1:-1]), "token ids: no tokenizer"
