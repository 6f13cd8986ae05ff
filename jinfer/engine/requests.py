"""What an engine is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jinfer.sampling.request_errors import RequestError as RequestError
from jinfer.sampling.sampling_params import SamplingParams

# "stop": an end of sequence, a stop text or id, or a complete grammar; "length": a limit.
FinishReason = Literal["stop", "length"]


class QueueFullError(RequestError):
    """More requests wait than `engine.queue` allows: come again later."""


class DeadlineError(RequestError):
    """A request that was not done in the time it had."""


class ClosedError(RequestError):
    """A request of a model that was closed, or is closed before it is done."""


class EngineError(RuntimeError):
    """A step failed; the requests in it end with this, and the engine goes on."""


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
        priority: lower ones go first; equal ones in the order they came.
        deadline: when it is to be given up, in seconds of `time.monotonic`.
        reuse: whether the beginning of the prompt may be taken from other requests' blocks.
        shown: special tokens that the text has, though it leaves out others.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    end_ids: tuple[int, ...] = ()
    encoder: tuple[int, ...] = ()
    priority: int = 0
    deadline: float | None = None
    reuse: bool = True
    shown: tuple[int, ...] = ()

    def seed(self, steady: int | None) -> bytes:
        """What its blocks depend on beside its tokens.

        Args:
            steady: tokens of a prompt up to which positions do not depend on its length.
        """
        length = len(self.prompt)
        stretched = length if steady is not None and length > steady else 0
        if not self.encoder and not stretched:
            return b""
        return np.array([stretched, *self.encoder], np.int64).tobytes()


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Attributes:
        logprob, top: its log-probability and the likeliest (id, log-probability), if asked for.
        last: why no other token will come, where that is known already.
        origin: who drafted it; "": nobody.
    """

    request: int
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    last: FinishReason | None = None
    origin: str = ""


@dataclass(frozen=True)
class Failed:
    """A request that cannot go on."""

    request: int
    error: Exception
