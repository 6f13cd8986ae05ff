"""What an engine is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from jinfer.sampling.params import SamplingParams
from jinfer.sampling.sampler import Sampled


@dataclass(frozen=True)
class Request:
    """A sequence to be continued.

    Attributes:
        id: of the caller's choosing; its tokens carry it.
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        encoder: token ids that an encoder reads; the prompt is then the decoder's.
        limit: tokens it may have in the end, prompt included; at most the context.
        end_ids: the model's own ends of sequence.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    end_ids: tuple[int, ...] = ()
    encoder: tuple[int, ...] = ()


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Attributes:
        logprob, top: its log-probability and the likeliest (id, log-probability), if asked for.
    """

    request: int
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def token_of(step: Sampled, row: int, request: Request) -> Token:
    """The token of a row of one step."""
    id, wanted = int(step.tokens[row]), request.sampling.logprobs
    if wanted is None:
        return Token(request.id, id)
    assert step.logprob is not None, "they were asked for"
    assert step.top_ids is not None
    assert step.top_logprobs is not None
    ids, logprobs = step.top_ids[row][:wanted], step.top_logprobs[row][:wanted]
    top = tuple((int(i), float(p)) for i, p in zip(ids, logprobs, strict=True))
    return Token(request.id, id, float(step.logprob[row]), top)
