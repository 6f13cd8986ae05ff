"""Preparation of requests: parallel sampling (n, best_of), grammars, processors, budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.engine.engine import Engine
from jinfer.engine.prompt_images import PromptImages
from jinfer.engine.requests import ImageSpan, Request, RequestError
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.thinking_budget import ThinkingLimit
from jinfer.loader.open_model import Opened
from jinfer.modelspec.image_table import ImageSpec
from jinfer.parallel.distributed.current_group import current_group
from jinfer.sampling.forbidden_tokens import ForbiddenTokens
from jinfer.sampling.logits_processors import LogitsProcessor, LogitsProcessors
from jinfer.sampling.sampling_params import CONSTRAINTS, SamplingParams
from jinfer.template.thinking_marks import opens_thought
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher

# Parameters that only programs of one process can have.
_ONE_HOST = ("logits_processors", "logprob_token_ids", "post_sampling_probs")


def start_grammar(request: Request, tokenizer: Tokenizer) -> Matcher:
    """The matcher of a constrained answer.

    Raises:
        RequestError: its strategy cannot keep it.
        ConstraintError: an invalid grammar.
    """
    sampling = request.sampling
    if sampling.strategy in ("beam", "contrastive"):
        raise RequestError(f"a grammar cannot be kept with strategy={sampling.strategy!r}")
    # Here: it is slow to import, and few requests need it.
    from jinfer.sampling.structured import compile_constraint

    given: dict[str, Any] = {name: getattr(sampling, name) for name in CONSTRAINTS}
    at_start = bool(request.encoder)
    return compile_constraint(tokenizer, **given, at_text_start=at_start).start()


def sampling_row(request: Request, opened: Opened, known: LogitsProcessors) -> SamplingRow:
    """A request's parameters as a row of the device state.

    Args:
        known: the logits processors that the model has.

    Raises:
        RequestError: a parameter that does not fit the model.
    """
    tokenizer = opened.tokenizer
    encode = partial(tokenizer.encode, special=False) if tokenizer else None
    for name in _ONE_HOST:
        if getattr(request.sampling, name) and current_group() is not None:
            raise RequestError(f"{name} cannot be kept by a model on several hosts")
    vocab, own = opened.spec.dims["vocab"], _processors(request.sampling, known)
    try:
        return SamplingRow.from_params(request.sampling, request.end_ids, vocab, encode, own)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _processors(sampling: SamplingParams, known: LogitsProcessors) -> tuple[LogitsProcessor, ...]:
    """The logits processors of a request; searches take none."""
    if not sampling.logits_processors:
        return ()
    if sampling.strategy in ("beam", "contrastive"):
        raise RequestError(f"logits_processors cannot be kept with strategy={sampling.strategy!r}")
    return known.resolve(sampling.logits_processors)


def prompt_images(
    engine: Engine,
    spec: ImageSpec | None,
    prompt: Sequence[int],
    spans: Sequence[ImageSpan],
    sampling: SamplingParams,
) -> PromptImages | None:
    """The images of a prompt by token; None: it has none.

    Raises:
        RequestError: the model or the strategy reads none, or placeholders and images do not fit.
    """
    if spec is None or engine.runner.images is None:
        if spans:
            raise RequestError("this model reads no images; leave them out")
        return None
    images = PromptImages.of(prompt, spans, spec.position, spec.mask, spec.lookup)
    stray = (np.array(prompt) == spec.placeholder) & (images.owner < 0)
    if stray.any():
        raise RequestError(
            f"token {spec.placeholder} of the prompt, at {int(stray.argmax())}, stands for an "
            "image that was not given; leave it out"
        )
    if not spans:
        return None
    _check_images(engine, images, sampling)
    return images


def _check_images(engine: Engine, images: PromptImages, sampling: SamplingParams) -> None:
    """Raises `RequestError` for images that this engine cannot compute, or not this way."""
    pipeline: Any = engine.runner.programs.pipeline
    if current_group() is not None:
        raise RequestError("images cannot be read by a model on several hosts")
    if images.ranges is not None and pipeline is not None and pipeline.hosted:
        raise RequestError(
            "images whose tokens see each other need the whole KV cache on the devices; leave out "
            "partition.host_kv_cache"
        )
    if images.longest > engine.scheduler.sizes[-1]:
        raise RequestError(
            f"an image of {images.longest} tokens is computed in one step; set "
            f"engine.prefill_chunk to {images.longest} or more"
        )
    driven = sampling.strategy in ("beam", "contrastive")
    if sampling.strategy == "contrastive" or (driven and (images.seed or images.owner[-1] >= 0)):
        raise RequestError(f"strategy={sampling.strategy!r} cannot be used with these images")


def thinking_limit(
    opened: Opened, sampling: SamplingParams, prompt: Sequence[int]
) -> ThinkingLimit | None:
    """The thinking budget of a request; None without one.

    Raises:
        RequestError: the model has no marks of thoughts, or the strategy cannot keep a budget.
    """
    budget, marks, tokenizer = sampling.thinking_token_budget, opened.thinking, opened.tokenizer
    if budget is None:
        return None
    if marks is None or tokenizer is None:
        raise RequestError(
            "thinking_token_budget: the model writes no marks of thoughts that are known; leave it "
            "out, or set prompt.reasoning"
        )
    if sampling.strategy in ("beam", "contrastive"):
        raise RequestError(
            f"thinking_token_budget cannot be kept with strategy={sampling.strategy!r}"
        )
    return ThinkingLimit(
        budget,
        marks,
        opens_thought(marks, prompt, tokenizer),
        partial(_encode_on, tokenizer),
        partial(tokenizer.decode, skip_special=False),
        sampling.thinking_budget_message or "",
    )


def _encode_on(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that goes on with another, without the space that begins a text."""
    whole = tokenizer.encode(text, special=False)
    if not tokenizer.strip_space:
        return whole
    before = tokenizer.encode("\n", special=False)
    both = tokenizer.encode(f"\n{text}", special=False)
    return both[len(before) :] if both[: len(before)] == before else whole


def check_thinking(request: Request, choice: SamplingRow, never: Iterable[int]) -> None:
    """Raises `RequestError` if the request forbids what ends its thoughts."""
    if request.thinking is None:
        return
    allowed = choice.mask if choice.masked else None
    rules = ForbiddenTokens.of(request.sampling, choice.sampler, allowed, never)
    ends = request.thinking.forced()
    for place, id in enumerate(ends):
        if rules.forbids(id, ends[:place], request.sampling.min_tokens):
            names = rules.names([id], ends[:place], request.sampling.min_tokens)
            raise RequestError(
                f"{' and '.join(names) or 'the model'} forbids token {id}, which "
                "thinking_token_budget forces at the end of a thought"
            )


def parallel_sampling(request: Request, ids: Iterator[int]) -> list[Request]:
    """Make a request for each answer: seeds differ, and log-probabilities rank the answers.

    Answers of a greedy request are equal.

    Args:
        request: the first one.
        ids: gives the others their ids.

    Raises:
        RequestError: more answers than a beam search has beams.
    """
    sampling = request.sampling
    count = sampling.best_of or sampling.n
    if count == 1:
        return [request]
    beam = sampling.strategy == "beam"
    if beam and count > min(sampling.n, sampling.beams):
        raise RequestError(
            f"a beam search of {sampling.beams} beams gives as many answers at most, its best; "
            f"set n, not best_of"
        )
    requests = []
    for index in range(count):
        seed = None if sampling.seed is None else (sampling.seed + index) % 2**64
        logprobs = sampling.logprobs
        if count > sampling.n:
            logprobs = logprobs or 0
        item = replace(sampling, seed=seed, logprobs=logprobs, n=1, best_of=None)
        id = request.id if index == 0 else next(ids)
        requests.append(replace(request, id=id, sampling=item))
    return requests
