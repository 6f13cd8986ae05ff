"""Tokens shaded by their log-probability, with the likeliest alternatives on hover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Protocol

from jinfer.html.token_text import flowing, visible

_SAID = 40  # columns of a token among alternatives


class Likely(Protocol):
    """What is shown of a `TokenLogprob`, whose package imports this one."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[Likely]: ...


def token_spans(tokens: Iterable[Likely], *, first: bool = True) -> str:
    """The text that tokens make, each the more shaded, the less likely it was.

    Args:
        first: whether one of these is the first that Tab reaches.
    """
    return "".join(_span(token, first and not at) for at, token in enumerate(tokens))


def alternatives(token: Likely) -> Iterator[str]:
    """Lines with a token and the likeliest others: probability, text, id."""
    others = [one for one in token.top if one.id != token.id]
    for one in (token, *others):
        yield f"{probability(one.logprob):6.1%}  {visible(one.text, _SAID) or '[]'}  {one.id}"


def probability(logprob: float) -> float:
    """exp of a log-probability, at most 1."""
    return math.exp(min(0.0, logprob))


def shade_of(logprob: float) -> str:
    """The style of a token that was not certain; nothing for one that was."""
    surprise = f"{1 - probability(logprob):.2f}"
    return f' style="--s:{surprise.removeprefix("0")}"' if float(surprise) else ""


def _span(token: Likely, tab: bool) -> str:
    text = escape(flowing(token.text) or f"[{token.id}]")
    said = escape("\n".join(alternatives(token)))
    reached = ' tabindex="0"' if tab else ""
    return f'<span class="token"{shade_of(token.logprob)}{reached} title="{said}">{text}</span>'
