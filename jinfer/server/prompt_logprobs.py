"""Prompt log-probabilities (`prompt_logprobs`, `echo`) of a request."""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.api.prompt_scores import prompt_logprobs
from jinfer.api.session import Session
from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.sampling.param_types import MAX_LOGPROBS
from jinfer.server.http_errors import invalid_request, unsupported_field


def score_prompt(session: Session, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """As `prompt_logprobs`, with the errors of a route. Slow.

    Raises:
        ApiError: `top` is too large, or the prompt is an encoder's.
    """
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid_request(f"it must be from 0 to {MAX_LOGPROBS}", "prompt_logprobs")
    if session.engine.model.has_cross_attention:
        raise unsupported_field("an encoder's tokens have no probabilities", "echo")
    return prompt_logprobs(session, ids, top)
