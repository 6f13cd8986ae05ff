"""Token spans: tokens shaded by log-probability, with the likeliest alternatives on hover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Protocol

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
    for each in (token, *others):
        yield f"{probability(each.logprob):6.1%}  {visible(each.text, _COLUMNS) or '[]'}  {each.id}"


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
