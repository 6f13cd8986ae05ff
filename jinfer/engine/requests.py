"""Requests and their events: what the engine takes, and the tokens and failures it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jinfer.engine.activation_use import ActivationUse
from jinfer.engine.prompt_images import ImageSpan as ImageSpan
from jinfer.engine.prompt_images import PromptImages
from jinfer.engine.thinking_budget import ThinkingLimit
from jinfer.sampling.request_errors import RequestError as RequestError
from jinfer.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class AdapterUse:
    """The LoRA adapter that a request is computed with.

    Attributes:
        name: what it was loaded as.
        slot: where its parameters stand in the stacks, from 1.
        digest: hash of its contents.
        scale: factor of its terms, in addition to the adapter's own.
    """

    name: str
    slot: int
    digest: bytes
    scale: float = 1.0

    @property
    def entry(self) -> tuple[int, int]:
        """The entry in a program's table: the slot, and the bits of the scale."""
        return self.slot, int(np.float32(self.scale).view(np.int32))

    @property
    def seed(self) -> bytes:
        """Bytes that keys and values depend on, in addition to the tokens."""
        return b"adapter" + self.digest + np.float32(self.scale).tobytes()


# "stop": end of sequence, stop string or id, or a complete grammar; "length": a limit.
FinishReason = Literal["stop", "length"]


class QueueFullError(RequestError):
    """More requests wait than `engine.queue` allows; try again later."""


class DeadlineError(RequestError):
    """A request that missed its deadline."""


class ClosedError(RequestError):
    """A request of a model that is closed, perhaps while it runs."""


class EngineError(RuntimeError):
    """A step failed: its requests end with this error, and the engine goes on."""


class NotFiniteError(EngineError):
    """What the model computed for a request is NaN or infinite; other requests go on."""

    def __init__(self, what: str = "logits") -> None:
        super().__init__(
            f"the {what} are NaN or infinite: see what loading says of the weights, or use "
            'dtype = "float32", if numbers are too large for another'
        )


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: chosen by the caller; its tokens carry it.
        prompt: token ids, at least one.
        sampling: sampling parameters.
        encoder: token ids for the encoder; the prompt is then the decoder's.
        limit: maximum number of tokens, prompt included; at most the context.
        end_ids: the model's end-of-sequence tokens.
        priority: lower ones go first, equal ones in order of arrival.
        deadline: when the request is given up, in seconds of `time.monotonic`.
        reuse: whether the prefix cache may be used.
        shown: special tokens that appear in the text, though others are left out.
        adapter: the LoRA adapter that it is computed with; None: none.
        thinking: its thinking budget; None: a thought may have any length.
        slot: the slot that it is known by afterwards; None: the one that it has had.
        activations: those that it captures and edits; None: none.
        images: those of the prompt; None: none.
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
    adapter: AdapterUse | None = None
    thinking: ThinkingLimit | None = None
    slot: int | None = None
    activations: ActivationUse | None = None
    images: PromptImages | None = None

    def seed(self, steady: int | None) -> bytes:
        """What the content of its blocks depends on extras the tokens.

        Args:
            steady: prompt length up to which positions do not depend on the length.
        """
        length = len(self.prompt)
        stretched = length if steady is not None and length > steady else 0
        extra = b"" if self.adapter is None else self.adapter.seed
        extra += b"" if self.activations is None else self.activations.seed
        extra += b"" if self.images is None else self.images.seed
        if not self.encoder and not stretched:
            return extra
        return extra + np.array([stretched, *self.encoder], np.int64).tobytes()


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Attributes:
        logprob, top: its log-probability and the likeliest (id, log-probability), if requested.
        last: finish reason, if it is known to be the last token.
        origin: draft source that proposed it; "": not drafted.
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
