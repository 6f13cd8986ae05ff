"""Completions as HTML for notebooks: each token is the more shaded, the less likely it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Protocol

from jinfer.html.html_page import fragment
from jinfer.html.token_text import flowing, visible

_COLUMNS = 40  # of a token among alternatives


class Likely(Protocol):
    """The part of a `TokenLogprob` that is shown; its package imports this one."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[Likely]: ...


def token_spans(tokens: Iterable[Likely], *, first: bool = True) -> str:
    """Text of tokens; each is the more shaded, the less likely it was.

    Args:
        first: whether Tab reaches the first token.
    """
    return "".join(_span(token, first and not at) for at, token in enumerate(tokens))


def alternatives(token: Likely) -> Iterator[str]:
    """Lines of a token and the likeliest others: probability, text, id."""
    others = [other for other in token.top if other.id != token.id]
    for item in (token, *others):
        yield f"{probability(item.logprob):6.1%}  {visible(item.text, _COLUMNS) or '[]'}  {item.id}"


def probability(logprob: float) -> float:
    """exp of a log-probability, at most 1."""
    return math.exp(min(0.0, logprob))


def shade_of(logprob: float) -> str:
    """Style attribute of a token; empty if the token was certain."""
    surprise = f"{1 - probability(logprob):.2f}"
    return f' style="--s:{surprise.removeprefix("0")}"' if float(surprise) else ""


def _span(token: Likely, tab: bool) -> str:
    text = escape(flowing(token.text) or f"[{token.id}]")
    title = escape("\n".join(alternatives(token)))
    index = ' tabindex="0"' if tab else ""
    return f'<span class="token"{shade_of(token.logprob)}{index} title="{title}">{text}</span>'


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
