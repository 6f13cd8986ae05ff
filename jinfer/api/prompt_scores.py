"""Prompt log-probabilities: each token of a prompt given those before, and the likeliest others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jinfer.api.prompt_inputs import no_decoder_error, no_head_error
from jinfer.api.session import Session
from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.engine.requests import NotFiniteError, RequestError
from jinfer.engine.runner.forward_passes import forward
from jinfer.sampling.param_types import MAX_LOGPROBS


def prompt_logprobs(session: Session, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of a decoder's tokens but the first, with the likeliest alternatives.

    The whole prompt is computed.

    Args:
        top: how many alternatives, at most 20.

    Raises:
        RequestError: `top` is out of range, the model has no decoder or no vocabulary head, or
            its encoder reads the prompt.
    """
    spec = session.opened.spec
    if type(top) is not int or not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top is {top!r}; give how many alternatives, from 0 to {MAX_LOGPROBS}")
    if spec.decoder is None:
        raise RequestError(no_decoder_error(spec))
    if not spec.generates:
        raise RequestError(no_head_error(spec))
    if session.engine.model.has_cross_attention:
        raise RequestError("an encoder reads the prompt, and its tokens have no probabilities")
    if len(ids) < 2:
        return []
    session.check_text(ids)
    chosen, likeliest, logprobs = session.thread.run(lambda engine: forward(engine, ids, "ranked"))
    if np.isnan(chosen).any():
        raise NotFiniteError
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
