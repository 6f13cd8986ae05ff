"""Prompt log-probabilities (`prompt_logprobs`, `echo`)."""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.api.session import Session
from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.engine.runner.forward_passes import forward
from jinfer.sampling.param_ranges import MAX_LOGPROBS
from jinfer.server.http_errors import invalid_request, unsupported_field


def score_prompt(session: Session, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of a prompt's tokens but the first, with the likeliest alternatives. Slow.

    Raises:
        ApiError: `top` is too large, or the prompt is an encoder's.
    """
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid_request(f"it must be from 0 to {MAX_LOGPROBS}", "prompt_logprobs")
    if session.engine.model.has_cross_attention:
        raise unsupported_field("an encoder's tokens have no probabilities", "echo")
    if len(ids) < 2:
        return []
    chosen, likeliest, logprobs = session.thread.run(lambda engine: forward(engine, ids, "ranked"))
    tokenizer = session.opened.tokenizer

    def entry(id: int, logprob: float, others: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = tokenizer.decode([id], skip_special=False) if tokenizer else ""
        return TokenLogprob(id, text, logprob, others)

    result = []
    for place, id in enumerate(ids[1:]):
        pairs = zip(likeliest[place, :top].tolist(), logprobs[place, :top].tolist(), strict=True)
        others = tuple(entry(other, logprob) for other, logprob in pairs)
        result.append(entry(id, float(chosen[place]), others))
    return result
