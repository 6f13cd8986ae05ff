"""Forward results of whole prompts: logits, log-probabilities, hidden states, pooled output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import numpy as np

from jinfer.api.prompt_inputs import Prompt, no_decoder_error, no_head_error, parse_prompts
from jinfer.api.session import Session
from jinfer.engine.engine import Engine
from jinfer.engine.output.completion import TokenLogprob
from jinfer.engine.requests import NotFiniteError, RequestError
from jinfer.engine.runner.forward_passes import Passes, encode, forward
from jinfer.nn.abstract_model import Want
from jinfer.sampling.param_types import MAX_LOGPROBS

if TYPE_CHECKING:
    from jinfer.api.session import Session

Result = Literal["logits", "hidden", "pooled", "classes", "score"]


def forward_results(
    session: Session,
    given: object,
    want: Result,
    encoder_given: object | None = None,
    token_type_ids: Sequence[Sequence[int]] | None = None,
    last: bool = False,
) -> list[np.ndarray]:
    """One result per prompt; arguments as `LLM.logits`.

    Raises:
        RequestError: it has no such result.
        NotFiniteError: of scores; other results are given as they are.
    """
    spec = session.opened.spec
    if encoder_given is not None and not session.engine.runner.model.has_cross_attention:
        raise RequestError(
            "encoder_ids are for a model with an encoder and a decoder; leave them out"
        )
    if token_type_ids is not None and spec.decoder is not None:
        raise RequestError("token_type_ids are for an encoder; leave them out")
    texts = encoded_prompts(session, given)
    if spec.decoder is None:
        if want not in {"hidden", *spec.stacks[0].head.results}:
            raise RequestError(f"the model has no head that gives {want}")
        types = token_types(texts, token_type_ids, spec.dims.get("types"))
        job = lambda engine: encode(engine.runner, texts, types, cast("Want", want))  # noqa: E731
        arrays = session.thread.run(job)
        return [array[-1] for array in arrays] if last else arrays
    if want == "pooled":
        raise RequestError("the model has no pooler; use embed")
    if want == "classes" and want not in spec.decoder.head.results:
        raise RequestError("the model has no head that gives classes")
    if want not in ("hidden", "classes") and not spec.generates:
        raise RequestError(no_head_error(spec))
    encoders: list[list[int]] = [[]] * len(texts)
    if session.engine.runner.model.has_cross_attention:
        encoders = [] if encoder_given is None else encoded_prompts(session, encoder_given)
        if len(encoders) != len(texts):
            raise RequestError("an encoder-decoder needs encoder_ids, one for each prompt")
    if want == "score" and any(len(ids) < 2 for ids in texts):
        raise RequestError("a prompt to be scored needs at least two tokens")
    results = [
        session.thread.run(partial(_forward, ids, encoder, want, last))
        for ids, encoder in zip(texts, encoders, strict=True)
    ]
    if want == "score" and any(np.isnan(scores).any() for scores in results):
        raise NotFiniteError
    return results


def token_types(texts: list[list[int]], given: object, known: int | None) -> list[list[int]]:
    """Validates token type ids; zeros where none are passed.

    Args:
        known: how many types the model has; None: unknown.
    """
    if given is None:
        return [[0] * len(ids) for ids in texts]
    try:
        types = [[index(item) for item in row] for row in cast("Any", given)]
    except TypeError:
        raise RequestError("token_type_ids are lists of whole numbers, one for each text") from None
    if [len(row) for row in types] != [len(ids) for ids in texts]:
        raise RequestError("token_type_ids must be as long as the texts")
    if known and any(not 0 <= item < known for row in types for item in row):
        raise RequestError(f"token_type_ids are from 0 to {known - 1}, as many as the model has")
    return types


def encoded_prompts(session: Session, given: object) -> list[list[int]]:
    """Token ids of prompts. Raises `RequestError` for one that is empty or too long."""
    encoded = [session.encode(prompt) for prompt in parse_prompts(given)]
    for ids in encoded:
        session.check_text(ids)
    return encoded


def _forward(
    ids: list[int], encoder: list[int], want: Any, last: bool, engine: Engine
) -> Passes[np.ndarray]:
    return forward(engine.runner, engine.scheduler, ids, want, encoder, last=last)


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
    if session.engine.runner.model.has_cross_attention:
        raise RequestError("an encoder reads the prompt, and its tokens have no probabilities")
    if len(ids) < 2:
        return []
    session.check_text(ids)
    chosen, likeliest, logprobs = session.thread.run(
        lambda engine: forward(engine.runner, engine.scheduler, ids, "ranked")
    )
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
