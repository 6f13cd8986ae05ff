"""llama.cpp response: the format of /completion, and of `__verbose` in OpenAI's responses."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from jinfer.engine.output.completion import Completion
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.server.core import usage
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.models.served_model import ServedModel


def llamacpp_response(
    model: ServedModel, job: PromptRequests, answer: Completion, index: int
) -> dict[str, Any]:
    """Return a whole answer.

    Args:
        index: number of the answer within the request.
    """
    content = {"index": index, "content": answer.text, "tokens": answer.token_ids}
    return content | statistics(model, job, answer)


def statistics(model: ServedModel, job: PromptRequests, answer: Completion) -> dict[str, Any]:
    """Return an answer's statistics and settings."""
    used, tokenizer = answer.usage, model.llm.tokenizer
    text = "" if tokenizer is None else tokenizer.decode(job.ids, skip_special=False)
    kind, word = _stopped(answer)
    return {
        "id_slot": slot_of(job),
        "stop": True,
        "model": model.name,
        "tokens_predicted": len(answer.token_ids),
        "tokens_evaluated": used.prompt_tokens,
        "tokens_cached": used.cached_tokens,
        "generation_settings": generation_settings(model, job),
        "prompt": text,
        "has_new_line": "\n" in answer.text,
        "truncated": _is_at_context(model, answer),
        "stop_type": kind,
        "stopping_word": word,
        "timings": usage.llamacpp_timings(used),
    }


def slot_of(job: PromptRequests) -> int:
    """Return the slot of a request; -1: not set."""
    return -1 if job.options.slot is None else job.options.slot


def _stopped(answer: Completion) -> tuple[str, str]:
    """Return the stop type of an answer, and its stop text."""
    if answer.finish_reason == "length":
        return "limit", ""
    return "word" if answer.stop_string else "eos", answer.stop_string


def _is_at_context(model: ServedModel, answer: Completion) -> bool:
    """Return whether the answer filled the context."""
    tokens = answer.usage.prompt_tokens + len(answer.token_ids)
    return answer.finish_reason == "length" and tokens >= model.session.opened.context


def generation_settings(model: ServedModel, job: PromptRequests) -> dict[str, Any]:
    """Return the generation settings of a request, under llama.cpp's and jinfer's names."""
    params = job.options.params
    return {
        "seed": -1,
        **set_parameters(params),
        "n_predict": params.max_tokens or -1,
        "n_probs": params.logprobs or 0,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": params.penalty_last_n,
        "adaptive_target": -1.0,  # off: there is no such sampler
        "adaptive_decay": 0.9,
        "logit_bias": _biases(model, params),
    }


def _biases(model: ServedModel, params: SamplingParams) -> list[dict[str, Any]]:
    """Return the logit biases; null: the token is banned."""
    tokenizer = model.llm.tokenizer
    known = dict(params.logit_bias or ())
    if params.ignore_eos and tokenizer is not None:
        known |= dict.fromkeys(tokenizer.eos_ids, -math.inf)
    return [
        {"token": id, "bias": value if math.isfinite(value) else None}
        for id, value in known.items()
    ]


def set_parameters(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters with a value."""
    return {name: value for name, value in asdict(params).items() if value not in (None, ())}
