"""Log-probabilities of a generated token and of the likeliest others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely the model found it.

    Attributes:
        id, text: the token.
        logprob: its natural log-probability, before temperature and filters.
        top: the likeliest tokens at its place, likeliest first.
    """

    id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
