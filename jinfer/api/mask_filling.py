"""Masked language modelling: the likeliest tokens at the masks of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from jinfer.api.forward_results import forward_results
from jinfer.api.prompt_inputs import Prompt
from jinfer.engine.output.completion import TokenLogprob
from jinfer.engine.requests import NotFiniteError, RequestError

if TYPE_CHECKING:
    from jinfer.api.session import Session


def fill_mask(session: Session, text: Prompt, top: int) -> list[list[TokenLogprob]]:
    """As `LLM.fill_mask`."""
    tokenizer = session.tokenizer
    if tokenizer.mask_id is None:
        raise RequestError("the tokenizer has no mask token")
    ids = session.encode(text)
    positions = [position for position, id in enumerate(ids) if id == tokenizer.mask_id]
    if type(top) is not int or top < 1:
        raise RequestError(f"top is {top!r}; give how many tokens, from 1")
    if not positions:
        raise RequestError(f"the text has no {tokenizer.token(tokenizer.mask_id)}")
    logits = forward_results(session, [ids], "logits", None, None)[0]
    logprobs = jax.nn.log_softmax(logits[positions], axis=-1)
    if np.isnan(logprobs).any():
        raise NotFiniteError
    return [
        [
            TokenLogprob(id, tokenizer.decode([id], skip_special=False), float(row[id]))
            for id in np.argsort(-row)[:top].tolist()
        ]
        for row in np.asarray(logprobs)
    ]
